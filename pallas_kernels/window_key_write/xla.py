"""The definition of `window_key_write` in plain jnp; its contract is in the package's docstring."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.index_key_write.xla import rotated_key
from pallas_kernels.stored_rows import store_rows
from v41jax.quantization import fake_q8, quantize_q8

Array = jax.Array


def stored_row(keys: Array, window_format: str) -> Array:
    """Rotated keys [N, d] as rows of a ring: [N, d], or [N, d + d / 32] uint8 for "fp8"."""
    if window_format == "fp8":
        return jnp.concatenate(quantize_q8(keys), axis=-1)
    return fake_q8(keys) if window_format == "bf16" else keys


def store(
    window: Array,
    keys: Array,
    written: Array,
    batch_ids: Array,
    positions: Array,
    slots: Array,
    ring_offset: Array | int,
    window_format: str,
) -> Array:
    """`window` with the rotated keys [N, d] of the rows that are `written`; the rest as of `window_key_write`."""
    rings, ring, row = window.shape
    # A masked destination is a positive ring that does not exist: -1 would wrap.
    owner = jnp.where(written, ring_offset + slots[jnp.maximum(batch_ids, 0)], rings)
    rows = stored_row(keys, window_format)
    place = (owner, positions % ring)
    return store_rows(window, place if rows.shape[1] == row else (*place, slice(0, rows.shape[1])), rows)


def window_key_write(
    latents: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    written: Array,
    batch_ids: Array,
    positions: Array,
    slots: Array,
    ring_offset: Array | int,
    window: Array,
    *,
    epsilon: float,
    window_format: str,
    layer: Array | int | None = None,
) -> Array:
    """See the package's docstring."""
    if layer is not None:
        norm = lax.dynamic_index_in_dim(norm, layer, keepdims=False)
    keys = rotated_key(latents, norm, cos, sin, epsilon)
    return store(window, keys, written, batch_ids, positions, slots, ring_offset, window_format)
