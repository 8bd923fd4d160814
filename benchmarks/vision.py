"""Images per second: pixel work on the host, tower and aligner on the device. JSON lines on standard output.

    python -m benchmarks.vision --preset v4.1-flash --sizes 640x480,1920x1080 --peak-tflops 989

Weights are random, of the preset's shapes. Times are medians over calls after one that compiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from benchmarks.provenance import provenance
from checkpoints.schema import tensor_schema
from v41jax.config import ModelConfig, VisionConfig
from v41jax.image_encoder import cell_capacity, pack_images, vision_inputs
from v41jax.image_processing import ProcessedImage, process_pixels
from v41jax.layers.vision import VisionParameters, encode_patches
from v41jax.precision import Precision
from v41jax.presets import PRESETS, preset
from v41jax.vision_parameters import vision_parameters


class RandomTensors:
    """Stands in for a checkpoint: small random values under every vision tensor's name."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self._schema = tensor_schema(config, ("vision",))
        self._random = np.random.default_rng(0)

    def tensor(self, name: str) -> np.ndarray:
        """The tensor of that name, float32."""
        return self._random.standard_normal(self._schema[name].shape, np.float32) * 0.02


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median time of a call that returns when its work is done; the first call is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def tower_flops(patches: int, cells: int, config: VisionConfig, text_hidden: int) -> int:
    """Multiplications and additions of the matrix products over that many patches and cells, attention dense."""
    width, inner = config.hidden_size, config.intermediate_size
    embedding = 3 * config.patch_size**2 * width
    block = 4 * width**2 + 3 * width * inner + 2 * patches * width
    aligner = width * config.downsample_ratio**2 * text_hidden + text_hidden**2
    return 2 * (patches * (embedding + config.num_hidden_layers * block) + cells * aligner)


def time_pixels(picture: Image.Image, config: VisionConfig, repeats: int) -> dict[str, object]:
    """One image on one core: resize, pad, normalise, cut."""
    seconds = median_seconds(lambda: process_pixels(picture, config), repeats)
    return {"part": "pixels", "time_s": seconds, "images_per_s": 1 / seconds}


def time_tower(
    parameters: VisionParameters,
    images: list[ProcessedImage],
    config: ModelConfig,
    packed_patches: int,
    repeats: int,
    peak_tflops: float | None,
) -> dict[str, object]:
    """All images through tower and aligner, inputs already on the device."""
    vision = config.vision
    groups = list(pack_images(images, vision, packed_patches))
    calls = [jax.device_put(vision_inputs(group, vision)) for group in groups]

    def encode() -> None:
        jax.block_until_ready(
            [encode_patches(parameters, call, config=vision, precision=Precision()) for call in calls]
        )

    seconds = median_seconds(encode, repeats)
    flops = sum(tower_flops(image.grid.patches, image.grid.cells, vision, config.text.hidden_size) for image in images)
    result: dict[str, object] = {
        "part": "tower",
        "images": len(images),
        "calls": len(calls),
        "bucket": len(calls[0].segments),
        "cell_rows": cell_capacity(len(calls[0].segments), vision),
        "time_s": seconds,
        "images_per_s": len(images) / seconds,
        "tflops": flops / seconds / 1e12,
    }
    if peak_tflops:
        bound = flops / peak_tflops / 1e12
        result |= {"bound_s": bound, "fraction": bound / seconds}
    return result


def main() -> None:
    """Runs every size and prints one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="v4.1-flash")
    parser.add_argument("--sizes", default="640x480,1024x1024,1920x1080", help="width x height, comma-separated")
    parser.add_argument("--images", type=int, default=4, help="images of each size in one measurement")
    parser.add_argument("--packed-patches", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default="pixels,tower", help="what to measure; pixels alone needs no weights")
    parser.add_argument("--peak-tflops", type=float, help="bfloat16 peak of the device, to report the fraction of it")
    arguments = parser.parse_args()

    parts = arguments.parts.split(",")
    if not parts or set(parts) - {"pixels", "tower"}:
        parser.error(f"--parts {arguments.parts!r} must be pixels, tower, or both separated by a comma")
    config = preset(arguments.preset)
    parameters = None
    if "tower" in parts:
        parameters = jax.device_put(jax.tree.map(jnp.asarray, vision_parameters(RandomTensors(config))))
    common = {
        "benchmark": "vision",
        "preset": arguments.preset,
        "dtype": "bfloat16",
        **provenance(),
        "pillow": metadata.version("pillow"),
    }
    for size in arguments.sizes.split(","):
        width, height = (int(side) for side in size.split("x"))
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
        picture = Image.fromarray(pixels)
        image = process_pixels(picture, config.vision)
        shape = {"size": size, "patches": image.grid.patches, "tokens": image.grid.tokens}
        measured = []
        if "pixels" in parts:
            measured.append(time_pixels(picture, config.vision, arguments.repeats))
        if parameters is not None:
            images = [image] * arguments.images
            packed, peak = arguments.packed_patches, arguments.peak_tflops
            measured.append(time_tower(parameters, images, config, packed, arguments.repeats, peak))
        for record in measured:
            print(json.dumps({**common, **shape, **record}), flush=True)


if __name__ == "__main__":
    main()
