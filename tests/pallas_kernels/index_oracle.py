"""Float64 NumPy oracles and ragged, poisoned inputs for the index operations, written from the specification alone."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclasses.dataclass
class IndexCase:
    """Inputs of `index_scores` in NumPy, and the decoded operands the oracle needs.

    Pages that no live row sees, and rows of the last page at or past every bound, hold NaN codes.
    """

    query: np.ndarray
    head_weights: np.ndarray
    visible: np.ndarray
    batch_ids: np.ndarray
    block_tables: np.ndarray
    values: np.ndarray
    scales: np.ndarray | None
    index_format: str
    decoded: np.ndarray

    @property
    def arrays(self) -> tuple:
        """The operands in the order of `index_scores`, on the device."""
        operands = (
            self.query,
            self.head_weights,
            self.visible,
            self.batch_ids,
            self.block_tables,
            self.values,
            self.scales,
        )
        return tuple(None if x is None else jnp.asarray(x) for x in operands)


def decode_plane(values: np.ndarray, scales: np.ndarray | None, index_format: str) -> np.ndarray:
    """Key rows [..., I] float64."""
    if index_format == "float":
        return values.astype(np.float64)
    if index_format == "fp8":
        return values.view(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales[..., None]
    codes = np.stack([values & 15, values >> 4], axis=-1).reshape(*values.shape[:-1], -1)
    powers = np.where(scales == 255, np.nan, 2.0 ** (scales.astype(np.float64) - 127))
    return E2M1[codes] * np.repeat(powers, 32, axis=-1)


def quantize_query(query: np.ndarray, index_format: str) -> np.ndarray:
    """The query [N, Hi, I] on the plane's grid, float64, from float32 steps as the specification writes them."""
    x = query.astype(np.float32)
    if index_format == "float":
        return x.astype(np.float64)
    if index_format == "fp8":
        scale = np.maximum(np.abs(x).max(-1), np.float32(1e-10)) * np.uint32(0x3B124925).view(np.float32)
        codes = np.clip(x / scale[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return codes.astype(np.float64) * scale[..., None]
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    t = np.maximum(np.abs(blocks).max(-1), np.float32(6 * 2.0**-126)) * np.uint32(0x3E2AAAAB).view(np.float32)
    bits = t.astype(np.float32).view(np.uint32)
    power = 2.0 ** ((bits >> 23).astype(np.float64) + (bits & 0x7FFFFF != 0) - 127)
    codes = np.clip(blocks / power[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    return (codes.astype(np.float64) * power[..., None]).reshape(x.shape)


def index_case(
    seed: int,
    *,
    index_format: str,
    rows: int,
    requests: int,
    columns: int,
    rows_in_page: int = 16,
    heads: int = 4,
    width: int = 64,
    padding: int = 1,
    share_pages: bool = True,
    dtype: str = "float32",
) -> IndexCase:
    """A ragged batch: rows sorted by request, bounds of every size including 0, shared prefix pages, poisoned rest."""
    rng = np.random.default_rng(seed)
    context = columns * rows_in_page
    batch_ids = np.sort(rng.integers(0, requests, rows)).astype(np.int32)
    batch_ids[rows - min(padding, rows) :] = -1
    visible = rng.integers(0, context + 1, rows).astype(np.int32)
    visible[: min(rows, 3)] = [0, 1, context][: min(rows, 3)]
    pages = requests * columns + 2
    order = rng.permutation(np.arange(1, pages))[: requests * columns]
    tables = order.reshape(requests, columns).astype(np.int32)
    if share_pages and requests > 1:
        tables[1:, 0] = tables[0, 0]
    longest = np.zeros(requests, np.int64)
    for row, request in enumerate(batch_ids):
        if request >= 0:
            longest[request] = max(longest[request], visible[row])
    live = np.zeros((pages, rows_in_page), bool)
    for request in range(requests):
        for entry in range(longest[request]):
            live[tables[request, entry // rows_in_page], entry % rows_in_page] = True
        tables[request, -(-longest[request] // rows_in_page) :] = 0
    values, scales = random_plane(rng, pages, rows_in_page, width, index_format, dtype)
    decoded = decode_plane(values, scales, index_format)
    if index_format == "float":
        values[~live] = np.nan
    elif index_format == "fp8":
        values[~live] = 0x7F
        scales[~live] = np.nan
    else:
        values[~live] = 0x77
        scales[~live] = 255
    query = (rng.standard_normal((rows, heads, width)) * 2.0 ** rng.integers(-3, 3, (rows, heads, 1))).astype(dtype)
    query[batch_ids < 0] = np.nan
    weights = (rng.standard_normal((rows, heads)) / 64).astype(np.float32)
    return IndexCase(query, weights, visible, batch_ids, tables, values, scales, index_format, decoded)


def random_plane(rng, pages: int, rows_in_page: int, width: int, index_format: str, dtype: str = "float32") -> tuple:
    """Random stored keys without NaN codes."""
    if index_format == "float":
        return rng.standard_normal((pages, rows_in_page, width)).astype(dtype), None
    if index_format == "fp8":
        codes = rng.integers(0, 256, (pages, rows_in_page, width)).astype(np.uint8)
        codes[codes & 0x7F == 0x7F] = 0x7E
        scales = 2.0 ** rng.integers(-12, -4, (pages, rows_in_page))
        return codes, scales.astype(np.float32)
    codes = rng.integers(0, 256, (pages, rows_in_page, width // 2)).astype(np.uint8)
    return codes, rng.integers(122, 130, (pages, rows_in_page, width // 32)).astype(np.uint8)


def scores_oracle(case: IndexCase) -> np.ndarray:
    """[N, P * rows] float64, -inf where not visible."""
    query = quantize_query(np.nan_to_num(case.query.astype(np.float32)), case.index_format)
    rows, context = len(query), case.block_tables.shape[1] * case.values.shape[1]
    scores = np.full((rows, context), -np.inf)
    for row in range(rows):
        if case.batch_ids[row] < 0:
            continue
        keys = case.decoded[case.block_tables[case.batch_ids[row]]].reshape(context, -1)[: case.visible[row]]
        dots = np.maximum(query[row] @ keys.T, 0)
        scores[row, : case.visible[row]] = case.head_weights[row].astype(np.float64) @ dots
    return scores


def topk_oracle(scores: np.ndarray, visible: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Stable selection in float32: entries [N, k] ascending, -1 padded; counts [N]."""
    entries, counts = np.full((len(scores), k), -1, np.int32), np.zeros(len(scores), np.int32)
    for row, bound in enumerate(visible):
        ids = [j for j in range(min(bound, scores.shape[1])) if scores[row, j] > -np.inf]
        best = sorted(sorted(ids, key=lambda j: (-float(scores[row, j]), j))[:k])
        entries[row, : len(best)] = best
        counts[row] = len(best)
    return entries, counts


def candidates_oracle(scores: np.ndarray, visible: np.ndarray, num_blocks: int, block_size: int) -> np.ndarray:
    """Block ids [N, num_blocks] ascending, -1 padded."""
    chosen = np.full((len(scores), num_blocks), -1, np.int32)
    for row, bound in enumerate(visible):
        best = {}
        for entry in range(bound):
            score = scores[row, entry]
            if score > -np.inf:
                block = entry // block_size
                best[block] = max(best.get(block, -np.inf), float(score))
        if bound > 0:
            best[(bound - 1) // block_size] = np.inf
            order = sorted(best, key=lambda b: (b != (bound - 1) // block_size, -best[b], b))
            kept = sorted(order[:num_blocks])
            chosen[row, : len(kept)] = kept
    return chosen
