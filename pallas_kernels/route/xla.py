"""The definition of `route`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

SUM_FLOOR = 1e-20
"""Added to the sum of a row's scores (model specification, "MoE")."""


def scores_of(logits: Array, temperature: float) -> Array:
    """sqrt(softplus(logits / temperature)), float32 of any shape; what the kernel computes too."""
    value = logits / temperature
    # log1p keeps the negative tail: softplus(-30) is 9.4e-14 and must not vanish.
    softplus = jnp.where(value > 20, value, jnp.log1p(jnp.exp(jnp.minimum(value, 20))))
    return jnp.sqrt(softplus)


def route(
    logits: Array,
    bias: Array,
    bias_vl: Array,
    image_rows: Array,
    *,
    chosen: int,
    temperature: float,
    normalize: bool,
    scale: float,
    layer: Array | int | None = None,
) -> tuple[Array, Array]:
    """See `pallas_kernels.route`."""
    if layer is not None:
        bias, bias_vl = (lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in (bias, bias_vl))
    scores = scores_of(logits, temperature)
    biased = scores + jnp.where(image_rows[:, None], bias_vl, bias)
    # `top_k` would put a NaN before every number.
    _, experts = lax.top_k(jnp.where(jnp.isnan(biased), -jnp.inf, biased), chosen)
    experts = jnp.sort(experts, axis=-1)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + SUM_FLOOR)
    return experts, weights * scale
