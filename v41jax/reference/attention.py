"""One latent attention over a window of positions and selected compressed entries, and the compressor's pooling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from v41jax.reference.numerics import Arithmetic, Float
from v41jax.reference.records import FROM_FORWARD, HIDDEN

_BLOCK_ELEMENTS = 1 << 23  # bound on the gathered key elements held at once
_MAXIMUM_FLOOR = -1e30


def attend(
    query: Float,
    sink: Float,
    window_state: Float,
    window_forward: Float,
    window: NDArray[np.int8],
    compressed: Float | None,
    selected: NDArray[np.int32] | None,
    scale: float,
    arithmetic: Arithmetic,
) -> Float:
    """Attention output before the inverse rotation, [q, H, d] (model specification, "Attention").

    A position in both parts counts twice. The sink enters the denominator only.

    Args:
      query: [q, H, d] rotated; sink: [H] raw logits.
      window_state, window_forward: [n, d] rows by position, of the two banks that `window` names.
      window: [q, n] int8 of HIDDEN, FROM_STATE, FROM_FORWARD.
      compressed: [entries, d]; selected: [q, K] entries, -1 padded; both None at window-only layers.
      scale: softmax scale.
    """
    rows, heads, width = query.shape
    result = np.empty((rows, heads, width))
    widest = int((window != HIDDEN).sum(axis=1).max(initial=0))
    widest += selected.shape[1] if selected is not None else 0
    step = max(1, _BLOCK_ELEMENTS // max(1, widest * width))
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        keys, valid = _window_keys(window_state, window_forward, window[part])
        if selected is not None and compressed is not None and compressed.shape[0]:
            chosen = selected[part]
            keys = np.concatenate([keys, compressed[np.maximum(chosen, 0)]], axis=1)
            valid = np.concatenate([valid, chosen >= 0], axis=1)
        keys = np.where(valid[:, :, None], keys, 0.0)
        scores = np.where(valid[:, None, :], (query[part] @ keys.transpose(0, 2, 1)) * scale, -np.inf)
        peak = np.maximum(scores.max(axis=2, keepdims=True, initial=-np.inf), _MAXIMUM_FLOOR)
        weights = np.exp(scores - peak)
        total = weights.sum(axis=2, keepdims=True) + np.exp(sink[:, None] - peak)
        result[part] = arithmetic.activation((arithmetic.activation(weights) @ keys) / total)
    return result


def _window_keys(state: Float, forward: Float, window: NDArray[np.int8]) -> tuple[Float, NDArray[np.bool_]]:
    """Visible window rows packed to the left, in position order: keys [q, w, d] and their validity [q, w]."""
    counts = (window != HIDDEN).sum(axis=1)
    widest = int(counts.max(initial=0))
    positions = np.argsort(window == HIDDEN, axis=1, kind="stable")[:, :widest]
    bank = np.take_along_axis(window, positions, axis=1)
    keys = np.where((bank == FROM_FORWARD)[:, :, None], forward[positions], state[positions])
    return keys, np.arange(widest)[None, :] < counts[:, None]


def pool_pairs(values: Float, gates: Float) -> Float:
    """Gated mean of each group's tokens, channel by channel.

    Args:
      values, gates: [groups, ratio, d].

    Returns:
      [groups, d], unrounded (model specification, "Compressor").
    """
    exponentials = np.exp(gates - gates.max(axis=1, keepdims=True))
    return (exponentials / exponentials.sum(axis=1, keepdims=True) * values).sum(axis=1)


def grouped_output(attended: Float, wo_a: Float, groups: int, arithmetic: Arithmetic) -> Float:
    """Per-group projection of the heads, [q, groups * rank].

    Args:
      attended: [q, H, d] inverse-rotated; wo_a: [groups * rank, H * d / groups].
    """
    rows = attended.shape[0]
    inputs = attended.reshape(rows, groups, -1).transpose(1, 0, 2)
    weights = wo_a.reshape(groups, -1, inputs.shape[2]).transpose(0, 2, 1)
    return arithmetic.activation(inputs @ weights).transpose(1, 0, 2).reshape(rows, -1)
