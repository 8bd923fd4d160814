"""Ragged sparse-attention cases whose unused memory is poisoned, and what they mean in float64."""

import dataclasses
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from v41jax import quantization_numpy as quantization

NAN_BYTE = 255  # as an E4M3 code and as an E8M0 scale this is NaN
POISON_ID = 1 << 20


@dataclasses.dataclass
class AttentionCase:
    """Arguments of `sparse_attention` and the float64 rows they stand for."""

    arrays: list
    options: dict
    rows: list  # per query row: float64 [n, d] of its selected then window rows, or None for padding


def main_rows(rng, shape, main_format, dtype):
    """Compressed rows as stored, and their float64 values, [..., d]."""
    x = rng.normal(size=shape).astype(np.float32)
    if main_format == "float":
        stored = np.asarray(jnp.asarray(x, dtype))
        return stored, stored.astype(np.float64)
    codes, scales = quantization.quantize_q4n(x)
    values = quantization.fake_q4n(x).astype(np.float64)
    if main_format == "bf16":
        return values.astype(ml_dtypes.bfloat16), values
    return np.concatenate([quantization.pack_nibbles(codes), scales], -1), values


def window_rows(rng, shape, window_format, dtype):
    """Window rows as stored, and their float64 values, [..., d]."""
    x = rng.normal(size=shape).astype(np.float32)
    if window_format == "float":
        stored = np.asarray(jnp.asarray(x, dtype))
        return stored, stored.astype(np.float64)
    codes, scales = quantization.quantize_q8(x)
    values = quantization.fake_q8(x).astype(np.float64)
    if window_format == "bf16":
        return values.astype(ml_dtypes.bfloat16), values
    return np.concatenate([codes, scales], -1), values


def poisoned(shape, like):
    return np.full(shape, NAN_BYTE if like.dtype == np.uint8 else np.nan, like.dtype)


def attention_case(
    seed,
    *,
    rows,
    requests=3,
    heads=4,
    width=64,
    rotated=16,
    selected=8,
    window=8,
    ring=11,
    columns=3,
    page_rows=4,
    main_format="bf16",
    window_format="bf16",
    dtype=jnp.float32,
    fresh_rows=True,
    padding=0,
    sink_spread=1.0,
):
    """Random rows of `requests` requests. Every plane row, ring row and list entry that no row names is NaN or illegal.

    `fresh_rows`: a random tail of each window comes from the rows of this forward.
    """
    rng = np.random.default_rng(seed)
    count = rows + padding
    pages = requests * columns + 2
    live_main, main_values = main_rows(rng, (pages, page_rows, width), main_format, dtype)
    live_ring, ring_values = window_rows(rng, (requests + 2, ring, width), window_format, dtype)
    main, rings = poisoned(live_main.shape, live_main), poisoned(live_ring.shape, live_ring)
    block_tables = rng.permutation(pages)[: requests * columns].reshape(requests, columns).astype(np.int32)
    slots = rng.permutation(requests + 2)[:requests].astype(np.int32)
    fresh = np.array(jnp.asarray(rng.normal(size=(count if fresh_rows else 0, width)), dtype))
    used_fresh = np.zeros(len(fresh), bool)

    batch_ids = np.sort(rng.integers(0, requests, rows)).astype(np.int32)
    batch_ids = np.concatenate([batch_ids, np.full(padding, -1, np.int32)])
    positions = rng.integers(0, columns * page_rows, count).astype(np.int32)
    floors = np.where(rng.random(count) < 0.5, 0, rng.integers(0, positions + 1)).astype(np.int32)
    counts = np.minimum(rng.integers(0, selected + 1, count), positions + 1).astype(np.int32)
    entries = np.full((count, selected), POISON_ID, np.int32)
    from_position = positions + 1
    own_row = np.zeros(count, np.int32)
    if fresh_rows:
        own_row = np.arange(count, dtype=np.int32)
        from_position = np.maximum(positions - np.minimum(own_row, rng.integers(-1, window, count)), 0).astype(np.int32)
    row_values: list = []
    for n in range(count):
        request = batch_ids[n]
        if request < 0:
            row_values.append(None)
            continue
        chosen = np.sort(rng.permutation(positions[n] + 1)[: counts[n]])
        entries[n, : counts[n]] = chosen
        values = []
        for entry in chosen:
            page, line = block_tables[request, entry // page_rows], entry % page_rows
            main[page, line] = live_main[page, line]
            values.append(main_values[page, line])
        for q in range(max(positions[n] - window + 1, floors[n], 0), positions[n] + 1):
            if q >= from_position[n]:
                index = own_row[n] - (positions[n] - q)
                used_fresh[index] = True
                values.append(fresh[index].astype(np.float64))
            else:
                rings[slots[request], q % ring] = live_ring[slots[request], q % ring]
                values.append(ring_values[slots[request], q % ring])
        row_values.append(np.stack(values))
    fresh[~used_fresh] = np.nan
    angles = rng.random((count, rotated // 2)) * 6
    sink = (rng.normal(size=heads) * sink_spread).astype(np.float32)
    query = np.asarray(jnp.asarray(rng.normal(size=(count, heads, width)), dtype))
    arrays = [
        query, sink, entries, counts, main, block_tables, batch_ids, slots, rings, fresh, positions, floors,
        from_position.astype(np.int32), own_row, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32),
    ]  # fmt: skip
    if selected == 0:
        arrays[4] = None
    options = {"window": window, "scale": width**-0.5, "main_format": main_format, "window_format": window_format}
    return AttentionCase([None if x is None else jnp.asarray(x) for x in arrays], options, row_values)


def attention_oracle(case):
    """Float64 [N, H, d]: one softmax with the sink in the denominator, then the inverse rotation; padding is zero."""
    query, sink = (np.asarray(x, np.float64) for x in case.arrays[:2])
    cos, sin = (np.asarray(x, np.float64) for x in case.arrays[-2:])
    out = np.zeros(query.shape)
    rotated = 2 * cos.shape[1]
    for n, values in enumerate(case.rows):
        if values is None:
            continue
        scores = query[n] @ values.T * case.options["scale"]
        peak = np.maximum(scores.max(1), sink)[:, None]
        weights = np.exp(scores - peak)
        o = weights @ values / (weights.sum(1, keepdims=True) + np.exp(sink[:, None] - peak))
        even, odd = o[:, -rotated::2].copy(), o[:, -rotated + 1 :: 2].copy()
        o[:, -rotated::2] = even * cos[n] + odd * sin[n]
        o[:, -rotated + 1 :: 2] = odd * cos[n] - even * sin[n]
        out[n] = o
    return out


def relative_error(found, expected):
    """L2 of the difference over L2 of the expected values."""
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / math.sqrt((expected**2).sum())
