"""Checkpoint tensors widened to float64, exactly, on first use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from checkpoints.load import Checkpoint
from v41jax import quantization_numpy as codecs
from v41jax.reference.numerics import Float


class Weights:
    """Named tensors of one checkpoint as float64 arrays.

    Args of the constructor:
      checkpoint: open; must stay open as long as this object is used.
      keep: hold every widened tensor (small models); off widens anew at each use.
    """

    def __init__(self, checkpoint: Checkpoint, *, keep: bool = True):
        self._checkpoint = checkpoint
        self._keep = keep
        self._held: dict[str, Float] = {}
        self._experts_packed = checkpoint.config.expert_dtype == "fp4"

    def plain(self, name: str) -> Float:
        """A BF16 or F32 tensor."""
        return self._widened(name, lambda: self._checkpoint.tensor(name))

    def dense(self, name: str) -> Float:
        """`name.weight` with its 32x32 block scales, [out, in] (model specification, "Dequantization")."""
        return self._widened(
            name,
            lambda: codecs.dequantize_dense(
                self._checkpoint.tensor(f"{name}.weight"), self._checkpoint.tensor(f"{name}.scale")
            ),
        )

    def expert(self, name: str) -> Float:
        """A routed expert's matrix, [out, in]; packed E2M1 with 1x32 scales, or E4M3 with 32x32 ones."""
        if not self._experts_packed:
            return self.dense(name)
        return self._widened(
            name,
            lambda: codecs.dequantize_expert(
                self._checkpoint.tensor(f"{name}.weight"), self._checkpoint.tensor(f"{name}.scale")
            ),
        )

    def _widened(self, name: str, read: Callable[[], NDArray]) -> Float:
        if name in self._held:
            return self._held[name]
        value = np.asarray(read()).astype(np.float32).astype(np.float64)
        if self._keep:
            self._held[name] = value
        return value
