"""RMS normalization with one rounding, at the end, and where its weights lie."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels.quantized_rows.xla import rms_norm

__all__ = ["NormOfRun", "norm_operand", "rms_norm"]

Array = jax.Array


class NormOfRun(NamedTuple):
    """The weight of one layer's norm, in the stack of its run.

    Attributes:
      values: [layers, K].
      layer: int32 scalar, which layer of the run.
    """

    values: Array
    layer: Array


def norm_operand(weight: Array | NormOfRun) -> tuple[Array, Array | None]:
    """Weight and layer as the operations take them: [K] and None, or [layers, K] and which."""
    return (weight.values, weight.layer) if isinstance(weight, NormOfRun) else (weight, None)
