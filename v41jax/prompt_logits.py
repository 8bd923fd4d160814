"""What `v41jax logits` computes on: prompt files, their images encoded, and the reference model's logits of them."""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from checkpoints.load import Checkpoint
from v41jax.full_forward import split_rows
from v41jax.image_encoder import encode_images
from v41jax.image_processing import image_from_arrays
from v41jax.image_spans import locate_spans, span_embeddings
from v41jax.precision import Precision
from v41jax.reference.model import ReferenceModel
from v41jax.vision_parameters import vision_parameters


class Prompt:
    """Token ids and, for an image prompt, the rows and embeddings of its spans."""

    def __init__(self, ids: NDArray[np.int32], rows: NDArray[np.bool_] | None, embeddings: NDArray | None):
        self.ids = ids
        self.rows = rows
        self.embeddings = embeddings


def read_prompt(
    directory: Path,
    tokens: Path | None,
    image: Path | None,
    precision: Precision,
    projector_hidden_act: str | None = None,
) -> Prompt:
    """Reads and checks the input files; encodes the image.

    Args:
      directory: the checkpoint.
      tokens, image: files of the prompt; at least one.
      precision: of the encoding.
      projector_hidden_act: the aligner's activation in place of the one in the checkpoint's configuration.

    Raises:
      ValueError: no prompt, or files that do not hold what they must.
    """
    if tokens is None and image is None:
        raise ValueError("no prompt: give --tokens FILE.npy or --image FILE.npz")
    ids = None
    if tokens is not None:
        ids = _load(tokens, "--tokens").get("")
        if ids is None or ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ValueError(f"--tokens {tokens}: expected one integer array [n] with n >= 1")
    if image is None:
        with Checkpoint.open(directory, scopes=("text",)) as checkpoint:
            return Prompt(check_ids(ids, checkpoint.config.text.vocab_size), None, None)
    # A recording may prefix its names with `image.`.
    arrays = {key.removeprefix("image."): array for key, array in _load(image, "--image").items()}
    missing = [name for name in ("ids", "patches", "grid", "types") if name not in arrays]
    if missing:
        raise ValueError(f"--image {image}: it lacks the arrays {', '.join(missing)}")
    if ids is not None and not np.array_equal(ids, arrays["ids"]):
        raise ValueError(f"--tokens {tokens} and the ids of --image {image} differ; give one of them")
    return encode_prompt(directory, arrays, precision, projector_hidden_act)


def _load(path: Path, option: str) -> dict[str, NDArray]:
    """Arrays of an .npz file by name, or the one of an .npy file under the empty name."""
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return {"": loaded}
        with loaded:
            return {key: loaded[key] for key in loaded.files}
    except (ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{option} {path}: no file of NumPy arrays: {error}") from None


def check_ids(ids: NDArray, vocab_size: int) -> NDArray[np.int32]:
    """[n] int32 ids inside the vocabulary.

    Raises:
      ValueError: an id outside it.
    """
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"token id {outside[0]} is outside 0..{vocab_size - 1}, the model's vocabulary")
    return ids.astype(np.int32)


def encode_prompt(
    directory: Path, arrays: dict[str, NDArray], precision: Precision, projector_hidden_act: str | None = None
) -> Prompt:
    """Runs the vision tower on the one image of a prompt."""
    with Checkpoint.open(directory, scopes=("text", "vision")) as checkpoint:
        config = checkpoint.config
        vision = config.vision
        if projector_hidden_act is not None:
            vision = dataclasses.replace(vision, projector_hidden_act=projector_hidden_act)
        ids = check_ids(arrays["ids"], config.text.vocab_size)
        image = image_from_arrays(arrays["patches"], arrays["grid"], vision)
        located = locate_spans(ids, [image], config.image_token_id)
        types = located.token_types[located.image_mask]
        if not np.array_equal(types, arrays["types"]):
            raise ValueError(f"the types {arrays['types'].tolist()} are not those of the grid, {types.tolist()}")
        parameters = vision_parameters(checkpoint)
        encoded = encode_images(parameters, [image], vision, precision)[0]
        embeddings = span_embeddings(encoded, parameters.delimiters, image.grid)
    return Prompt(ids, located.image_mask, np.asarray(embeddings, np.float32))


def reference_logits(
    directory: Path, prompt: Prompt, precision: Precision, chunks: list[int] | None
) -> NDArray[np.float32]:
    """The float64 model's logits, with the rounding points of the activation dtype."""
    rounding = "bfloat16" if precision.activation_dtype == jnp.bfloat16 else "none"
    results = []
    with (
        Checkpoint.open(directory, scopes=("text",)) as checkpoint,
        ReferenceModel(
            checkpoint, rounding=rounding, activation_quantization=precision.activation_quantization
        ) as model,
    ):
        image = np.zeros(len(prompt.ids), bool) if prompt.rows is None else prompt.rows
        state, start = None, 0
        for length in split_rows(len(prompt.ids), chunks):
            rows = slice(start, start + length)
            before = int(image[:start].sum())
            embeddings = None
            if image[rows].any():
                embeddings = prompt.embeddings[before : before + int(image[rows].sum())]
            output = model.forward(prompt.ids[rows], image[rows], embeddings, state=state, record=False)
            results.append(output.logits)
            state, start = output.state, start + length
    return np.concatenate(results).astype(np.float32)
