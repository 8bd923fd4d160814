"""Vision configurations, random weights and image files for the tests of images."""

from __future__ import annotations

import dataclasses
import io
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
from PIL import Image

from v41jax.config import ModelConfig, VisionConfig
from v41jax.image_planning import ImageGrid
from v41jax.image_processing import ProcessedImage, image_from_arrays

GOLDEN = Path(__file__).parents[1] / "golden"

RELEASED = VisionConfig(
    num_hidden_layers=32,
    hidden_size=1024,
    num_attention_heads=16,
    intermediate_size=2816,
    patch_size=14,
    rope_theta=10000.0,
    downsample_ratio=3,
    max_image_tokens=1024,
    min_pixels=295936,
    max_wh_ratio=None,
)

TINY = dataclasses.replace(
    RELEASED,
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=24,
    patch_size=2,
    max_image_tokens=64,
    min_pixels=100,
)

TEXT_HIDDEN = 48


def golden_config(name: str) -> ModelConfig:
    return ModelConfig.from_file(GOLDEN / name)


def golden_image(name: str) -> tuple[ProcessedImage, dict[str, np.ndarray]]:
    """The image of a golden checkpoint and the arrays recorded for it."""
    with np.load(GOLDEN / name / "expected.npz") as arrays:
        recorded = {key: arrays[key] for key in arrays.files if "image" in key}
    config = golden_config(name).vision
    return image_from_arrays(recorded["image.patches"], recorded["image.grid"], config), recorded


def tensor_shapes(config: VisionConfig, text_hidden: int = TEXT_HIDDEN) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the vision scope (vision specification, "Vision tower")."""
    width, inner, patch = config.hidden_size, config.intermediate_size, 3 * config.patch_size**2
    shapes: dict[str, tuple[int, ...]] = {
        "vision.patch_embed.proj.weight": (width, patch),
        "vision.patch_embed.proj.bias": (width,),
        "vision.norm.weight": (width,),
        "aligner.w1.weight": (text_hidden, width * config.downsample_ratio**2),
        "aligner.w1.bias": (text_hidden,),
        "aligner.w2.weight": (text_hidden, text_hidden),
        "aligner.w2.bias": (text_hidden,),
    }
    for block in range(config.num_hidden_layers):
        prefix = f"vision.blocks.{block}"
        shapes |= {
            f"{prefix}.norm1.weight": (width,),
            f"{prefix}.norm2.weight": (width,),
            f"{prefix}.attn.wqkv.weight": (3 * width, width),
            f"{prefix}.attn.wqkv.bias": (3 * width,),
            f"{prefix}.attn.wo.weight": (width, width),
            f"{prefix}.attn.wo.bias": (width,),
            f"{prefix}.mlp.w1.weight": (2 * inner, width),
            f"{prefix}.mlp.w2.weight": (width, inner),
        }
    return shapes | {f"image_{role}": (text_hidden,) for role in ("start", "newline", "end")}


def random_tensors(config: VisionConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random bfloat16 weights, scaled so that activations stay near 1."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        values = rng.standard_normal(shape) / (np.sqrt(shape[-1]) if len(shape) > 1 else 2)
        tensors[name] = (values + ("norm" in name)).astype(ml_dtypes.bfloat16)
    return tensors


def tensor_source(config: VisionConfig, tensors: dict[str, np.ndarray]) -> SimpleNamespace:
    """What `vision_parameters` needs of a checkpoint."""
    return SimpleNamespace(config=SimpleNamespace(vision=config), tensor=tensors.__getitem__)


def random_image(config: VisionConfig, patch_rows: int, patch_columns: int, seed: int = 0) -> ProcessedImage:
    """Random patches on a grid of that size."""
    rng = np.random.default_rng(seed)
    patches = rng.uniform(-1, 1, (patch_rows * patch_columns, 3 * config.patch_size**2)).astype(ml_dtypes.bfloat16)
    return ProcessedImage(patches, ImageGrid.of_patches(patch_rows, patch_columns, config.downsample_ratio))


def random_picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A Pillow image of random bytes."""
    bands = len(Image.new(mode, (1, 1)).getbands())
    data = np.random.default_rng(seed).integers(0, 256, width * height * bands, np.uint8)
    return Image.frombytes(mode, (width, height), data.tobytes())


def encoded(picture: Image.Image, file_format: str = "PNG", **options: object) -> bytes:
    """The picture as a file."""
    file = io.BytesIO()
    picture.save(file, file_format, **options)
    return file.getvalue()


def png(width: int, height: int, rows: bytes, *, depth: int = 8, colour: int = 2) -> bytes:
    """A PNG file with that header whatever its rows hold."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
