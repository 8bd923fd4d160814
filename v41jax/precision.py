"""The precision policy of a run: one object that names every rounding choice a caller may make."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Precision:
    """What activations are kept in and whether they are fake-quantized.

    Attributes:
      activation_dtype: bfloat16 for serving (the released rounding points), float32 for comparison.
      activation_quantization: apply the Q8, Q4m and Q4n activation formats of the model specification,
        "Where each quantizer is applied in the forward"; off makes every quantizer the identity.
      index_score_dtype: float32 keeps index scores unrounded; bfloat16 rounds the dot, each product with a head
        weight, and the sum, as the published code does.
    """

    activation_dtype: DTypeLike = jnp.bfloat16
    activation_quantization: bool = True
    index_score_dtype: DTypeLike = jnp.float32
