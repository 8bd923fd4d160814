"""A checkpoint that exists nowhere: its tensors are made when asked for, the same ones every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from checkpoints.safetensors_file import ARRAY_DTYPES
from checkpoints.schema import tensor_schema
from checkpoints.synthesize import maker, random_stream
from v41jax.config import ModelConfig


class MemoryCheckpoint:
    """What a load or the reference reads of a checkpoint, for configurations too large for a test's disk.

    Tensors of one layer are kept until another layer's are asked for.
    """

    def __init__(self, config: ModelConfig, seed: int = 0):
        self.config = config
        self.directory = Path("nowhere")
        self.schema = tensor_schema(config, scopes=("text",))
        self._seed = seed
        self._layer = ""
        self._kept: dict[str, NDArray] = {}

    def describe(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of a tensor as arrays have it."""
        spec = self.schema[name]
        return spec.shape, np.dtype(ARRAY_DTYPES[spec.dtype])

    def tensor(self, name: str) -> NDArray:
        """The tensor, read-only."""
        layer = ".".join(name.split(".")[:2])
        if layer != self._layer:
            self._layer, self._kept = layer, {}
        if name not in self._kept:
            shape, dtype = self.describe(name)
            parts = maker(name, self.schema[name], self.config)(random_stream(self._seed, name), shape)
            self._kept[name] = np.concatenate([part.reshape(-1).view(dtype) for part in parts]).reshape(shape)
            self._kept[name].setflags(write=False)
        return self._kept[name]

    def release(self, name: str) -> None:
        """Nothing is mapped."""
