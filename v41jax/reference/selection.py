"""Index scores, top-k and candidate blocks, with the total order of selections: higher score, then smaller id."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from v41jax.reference.numerics import Arithmetic, Float

_BLOCK_ELEMENTS = 1 << 24  # bound on the [rows, heads, entries] products held at once


def index_scores(
    query: Float, keys: Float, head_weights: Float, visible: NDArray[np.int64], arithmetic: Arithmetic
) -> Float:
    """Score of every entry for every row (model specification, "Indexer").

    Args:
      query: [q, Hi, I] quantized; keys: [entries, I] quantized; head_weights: [q, Hi], already scaled.
      visible: [q] number of entries a row may see.

    Returns:
      [q, entries]; -inf from `visible` on.
    """
    rows, heads, _ = query.shape
    entries = keys.shape[0]
    scores = np.empty((rows, entries))
    step = max(1, _BLOCK_ELEMENTS // max(1, heads * entries))
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        dots = arithmetic.index_score(query[part] @ keys.T)
        products = arithmetic.index_score(np.maximum(dots, 0.0) * head_weights[part, :, None])
        scores[part] = arithmetic.index_score(products.sum(axis=1))
    scores[np.arange(entries)[None, :] >= visible[:, None]] = -np.inf
    return scores


def best_first(scores: Float) -> NDArray[np.int64]:
    """Column order of [q, n] scores, best first; ties by smaller column, -0.0 equal to 0.0, NaN last."""
    return np.argsort(-scores, axis=1, kind="stable")


def select_topk(scores: Float, count: int) -> NDArray[np.int32]:
    """The `count` best columns above -inf, ascending, -1 padded: [q, count] int32."""
    rows, columns = scores.shape
    result = np.full((rows, count), -1, np.int32)
    taken = best_first(scores)[:, : min(count, columns)]
    chosen = np.take_along_axis(scores, taken, axis=1) > -np.inf
    ordered = np.sort(np.where(chosen, taken, columns), axis=1)
    result[:, : taken.shape[1]] = np.where(ordered < columns, ordered, -1)
    return result


def select_candidates(scores: Float, visible: NDArray[np.int64], blocks: int, block_size: int) -> NDArray[np.int32]:
    """The `blocks` best blocks of entries, ascending ids, -1 padded: [q, blocks] int32.

    The newest visible block is always kept; with nothing visible nothing is (model specification,
    "Two-level candidates").
    """
    rows, entries = scores.shape
    count = -(-entries // block_size)
    padded = np.full((rows, count * block_size), -np.inf)
    padded[:, :entries] = np.where(np.isnan(scores), -np.inf, scores)
    best = padded.reshape(rows, count, block_size).max(axis=2) if count else np.zeros((rows, 0))
    seeing = np.flatnonzero(visible > 0)
    best[seeing, (visible[seeing] - 1) // block_size] = np.inf
    return select_topk(best, blocks)


def within_candidates(candidates: NDArray[np.int32], block_size: int, entries: int) -> NDArray[np.bool_]:
    """[q, entries] bool: the entry lies in one of the row's candidate blocks."""
    count = -(-entries // block_size)
    kept = np.zeros((candidates.shape[0], count + 1), bool)
    np.put_along_axis(kept, np.where(candidates < 0, count, candidates), True, axis=1)
    return np.repeat(kept[:, :count], block_size, axis=1)[:, :entries]
