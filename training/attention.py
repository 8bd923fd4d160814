"""Attention of whole sequences: a blocked sliding window and masked entries under one softmax.

The same values as the runtime's gathered attention, in a form that matrix units like in both directions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rounding import round_to
from training.straight_through import contract

Array = jax.Array

_PEAK_FLOOR = -1e30


def window_mask(length: int, window: int, cut: Array) -> Array:
    """Visibility of the previous and the own block of keys.

    Args:
      length: L, a multiple of `window`.
      window: W.
      cut: [B] int32; queries from this position on see no window key before it (a rebuilt window); 0 cuts nothing.

    Returns:
      [B, L / W, W, 2 W] bool; key `j` of block `n` is at position `(n - 1) W + j`.
    """
    blocks = length // window
    query = jnp.arange(length, dtype=jnp.int32).reshape(blocks, window, 1)
    key = (jnp.arange(blocks, dtype=jnp.int32)[:, None] - 1) * window + jnp.arange(2 * window, dtype=jnp.int32)
    key = key[:, None, :]
    seen = (key >= 0) & (key <= query) & (key > query - window)
    cut = cut[:, None, None, None]
    return seen & ((query < cut) | (key >= cut))


def attend(
    query: Array,
    sink: Array,
    keys: Array,
    seen: Array,
    entries: Array | None,
    chosen: Array | None,
    *,
    window: int,
    scale: float,
) -> Array:
    """Attention before the inverse rotation (model specification, "Attention").

    Args:
      query: [B, L, H, d] activation dtype.
      sink: [H] float32.
      keys: [B, L, d] activation dtype, window rows, keys and values alike.
      seen: [B, L / W, W, 2 W] bool, from `window_mask`.
      entries: [B, E, d] compressed rows, None in window-only layers.
      chosen: [B, L, E] bool.
      window: W.
      scale: softmax scale.

    Returns:
      [B, L, H, d] activation dtype.
    """
    batch, length, heads, width = query.shape
    blocks = length // window
    own = keys.reshape(batch, blocks, window, width)
    before = jnp.pad(own, ((0, 0), (1, 0), (0, 0), (0, 0)))[:, :-1]
    near = jnp.concatenate([before, own], axis=2)
    rows = query.reshape(batch, blocks, window * heads, width)
    scores = contract("bnqd,bnkd->bnqk", rows, near) * scale
    scores = scores.reshape(batch, blocks, window, heads, 2 * window)
    scores = jnp.where(seen[:, :, :, None, :], scores, -jnp.inf).reshape(batch, length, heads, 2 * window)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    far = None
    if entries is not None:
        far = contract("bqd,bed->bqe", query.reshape(batch, length * heads, width), entries) * scale
        far = far.reshape(batch, length, heads, -1)
        far = jnp.where(chosen[:, :, None, :], far, -jnp.inf)
        peak = jnp.maximum(peak, jnp.max(far, axis=-1, keepdims=True))
    peak = jax.lax.stop_gradient(jnp.maximum(peak, _PEAK_FLOOR))
    shares = jnp.exp(scores - peak)
    total = jnp.sum(shares, axis=-1, keepdims=True) + jnp.exp(sink[:, None] - peak)
    shares = round_to(shares, query.dtype).reshape(batch, blocks, window * heads, 2 * window)
    result = contract("bnqk,bnkd->bnqd", shares, near).reshape(batch, length, heads, width)
    if far is not None:
        shares = jnp.exp(far - peak)
        total = total + jnp.sum(shares, axis=-1, keepdims=True)
        shares = round_to(shares, query.dtype).reshape(batch, length * heads, -1)
        result = result + contract("bqe,bed->bqd", shares, entries).reshape(batch, length, heads, width)
    return round_to(result / total, query.dtype)


def entry_shares(query: Array, entries: Array, visible: Array, scale: float) -> Array:
    """How attention divides over all visible entries, averaged over heads; what an indexer must predict.

    Args:
      query: [B, Q, H, d]; entries: [B, E, d]; visible: [B, Q, E] bool.

    Returns:
      [B, Q, E] float32; zeros where nothing is visible.
    """
    batch, rows, heads, width = query.shape
    scores = contract("bqd,bed->bqe", query.reshape(batch, rows * heads, width), entries) * scale
    scores = jnp.where(visible[:, :, None, :], scores.reshape(batch, rows, heads, -1), -1e30)
    shares = jax.nn.softmax(scores, axis=-1) * visible[:, :, None, :]
    return jnp.mean(shares, axis=2)
