"""Masters to a checkpoint directory in the released layout, tokenizer included."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from checkpoints.save import write_checkpoint
from checkpoints.schema import Role, TensorSpec, tensor_schema
from checkpoints.synthesize import maker, random_stream
from training.straight_through import quantize_dense, quantize_expert, quantize_table
from training.weights import Masters, stacked_name
from v41jax.config import ModelConfig
from v41jax.quantization_numpy import pack_nibbles

_QUANTIZERS = {
    Role.DENSE_WEIGHT: jax.jit(quantize_dense),
    Role.EXPERT_WEIGHT: jax.jit(quantize_expert),
    Role.TABLE_WEIGHT: jax.jit(quantize_table),
}
_WEIGHT_OF_SCALE = {
    Role.DENSE_SCALE: Role.DENSE_WEIGHT,
    Role.EXPERT_SCALE: Role.EXPERT_WEIGHT,
    Role.TABLE_SCALE: Role.TABLE_WEIGHT,
}


def stored(name: str, spec: TensorSpec, masters: Masters) -> NDArray[Any]:
    """One tensor as its file holds it."""
    role = _WEIGHT_OF_SCALE.get(spec.role, spec.role)
    weight = name.removesuffix(".scale") + ".weight" if spec.role.is_scale else name
    stack = stacked_name(weight)
    master = masters[weight] if stack is None else np.asarray(masters[stack[0]])[stack[1]]
    if role is Role.PLAIN:
        return np.asarray(master).astype(np.float32 if spec.dtype == "F32" else ml_dtypes.bfloat16)
    codes, scales = (np.asarray(part) for part in _QUANTIZERS[role](master))
    if spec.role.is_scale:
        return scales
    return pack_nibbles(codes) if role is Role.EXPERT_WEIGHT else codes


def export(directory: Path, config: ModelConfig, masters: Masters, tokenizer: Path, seed: int = 0) -> None:
    """Writes a checkpoint. The image encoder, which nobody trained, gets random values.

    Args:
      directory: must not hold a checkpoint.
      config: of the model.
      masters: of the text and draft scopes.
      tokenizer: the `tokenizer.json` to put beside the weights.
      seed: of the image encoder.
    """

    def contents(name: str, spec: TensorSpec) -> Iterator[NDArray[Any]]:
        if name.startswith(("vision.", "aligner.", "image_")):
            yield from maker(name, spec, config)(random_stream(seed, name), spec.shape)
        else:
            yield stored(name, spec, masters)

    write_checkpoint(directory, config, tensor_schema(config), contents)
    shutil.copyfile(tokenizer, directory / "tokenizer.json")
