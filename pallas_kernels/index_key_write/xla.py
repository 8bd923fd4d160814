"""The definition of `index_key_write` in plain jnp; its contract is in the package's docstring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rotation import rotate
from pallas_kernels.rounding import round_to
from v41jax.quantization import pack_nibbles, quantize_index_key_fp8, quantize_q4m

Array = jax.Array


def rotated_key(keys: Array, norm: Array, cos: Array, sin: Array, epsilon: float) -> Array:
    """`rope(rms_norm(keys))`, [C, I] in and out, rounded to the dtype of `keys` after each of the two."""
    value = keys.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(jnp.square(value), axis=-1, keepdims=True) + epsilon)
    normed = round_to(norm.astype(jnp.float32) * (value * scale), keys.dtype)
    return rotate(normed, cos, sin)


def stored_key(key: Array, index_format: str) -> tuple[Array, Array | None]:
    """Rotated keys [C, I] as rows of the plane: values [C, I] or [C, I / 2], scales or None."""
    if index_format == "fp8":
        return quantize_index_key_fp8(key)
    if index_format == "fp4":
        codes, scales = quantize_q4m(key)
        return pack_nibbles(codes), scales
    return key, None


def index_key_write(
    keys: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    requests: Array,
    entries: Array,
    block_tables: Array,
    values: Array,
    scales: Array | None,
    *,
    epsilon: float,
    index_format: str,
) -> tuple[Array, Array | None]:
    """See the package's docstring."""
    pages, rows_in_page = values.shape[:2]
    rows, row_scales = stored_key(rotated_key(keys, norm, cos, sin, epsilon), index_format)
    live = requests >= 0
    entry = jnp.where(live, entries, 0)
    page = block_tables[jnp.where(live, requests, 0), entry // rows_in_page]
    # A masked destination is a positive page that does not exist: -1 would wrap.
    place = (jnp.where(live, page, pages), entry % rows_in_page)
    values = values.at[place].set(rows.astype(values.dtype), mode="drop")
    return values, None if scales is None else scales.at[place].set(row_scales, mode="drop")
