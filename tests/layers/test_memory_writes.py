"""Ring, tail and page writes: what is written where, and what padding must not touch; score tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler.batch import CompressionPlan
from tests.helpers.models import model
from v41jax.layers import indexer
from v41jax.layers.attention import write_ring
from v41jax.layers.compressor import CompressorWeights, OwnerMemory, compress
from v41jax.layers.rope import build_table, plain_frequencies
from v41jax.layers.rows import Requests, Rows, prepare_rows
from v41jax.presets import preset
from v41jax.spans import Span, batch_of

RING, SLOTS, LAYERS = 4, 3, 2


def rows_of(positions, batch_ids, ring_rows) -> Rows:
    empty = dict.fromkeys(Rows._fields)
    arrays = {
        "positions": jnp.array(positions, jnp.int32),
        "batch_ids": jnp.array(batch_ids, jnp.int32),
        "ring_rows": jnp.array(ring_rows),
    }
    return Rows(**empty | arrays)


@pytest.mark.parametrize("window_format", ["float", "bf16", "fp8"])
def test_rows_land_at_their_position_modulo_the_ring_of_their_slot(window_format):
    width = 32
    dtype, row = {"float": (jnp.float32, width), "bf16": (jnp.bfloat16, width), "fp8": (jnp.uint8, width + 1)}[
        window_format
    ]
    window = jnp.full((LAYERS * SLOTS, RING, row), 77, dtype)
    kv = jnp.asarray(np.arange(1, 5)[:, None] * np.ones(width), jnp.float32)
    rows = rows_of([5, 6, 9, 3], [0, 0, 1, -1], [True, True, False, False])
    after = np.asarray(write_ring(window, kv, rows, jnp.array([2, 0]), SLOTS, window_format=window_format), np.float32)
    changed = np.argwhere((after != 77).any(axis=-1)).tolist()
    assert changed == [[SLOTS + 2, 5 % RING], [SLOTS + 2, 6 % RING]]
    if window_format != "fp8":
        assert after[SLOTS + 2, 1, 0] == 1 and after[SLOTS + 2, 2, 0] == 2


def compressed(ratio: int, plan: CompressionPlan, projections: np.ndarray):
    """Runs the compressor on one-hot inputs, so that row i projects to `projections[i]`."""
    text = dataclasses.replace(preset("pico").text, head_dim=32, index_head_dim=32, qk_rope_head_dim=2)
    count, width = projections.shape
    weights = CompressorWeights(
        wkv=jnp.asarray(projections.T),
        wgate=jnp.zeros((width, count)) if ratio > 1 else None,
        norm=jnp.ones(width),
        wk=jnp.eye(32),
        k_norm=jnp.ones(32),
    )
    # The tails of another owner lie before its own.
    tails = jnp.full((2, SLOTS, 2, 32), 5.0)
    rows = jnp.full((6, 8 // ratio, 32), jnp.nan)
    memory = OwnerMemory(rows, rows, None, tails, tails, None if ratio == 1 else 1)
    requests = Requests(jnp.array([1, 0]), jnp.array([[4, 2], [3, 0]]))
    table = build_table(plain_frequencies(10.0, 2), 32)
    return compress(
        jnp.eye(count),
        weights,
        memory,
        CompressionPlan(*(jnp.array(part, jnp.int32) for part in plan)),
        requests,
        table,
        ratio=ratio,
        text=text,
        main_format="float",
        index_format="float",
    )


def normalized(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2))


def test_ratio_one_writes_every_planned_row_and_nothing_else():
    values = np.random.default_rng(0).standard_normal((3, 32)).astype(np.float32)
    plan = CompressionPlan([0, 2, 3], [0, 1, -1], [9, 3, -1], [0, 0, 0], [], [], [])
    memory = compressed(1, plan, values)
    written = np.argwhere(np.isfinite(np.asarray(memory.main)).all(axis=-1)).tolist()
    assert written == [[2, 1], [3, 3]]
    assert np.allclose(np.asarray(memory.main)[3, 3, :30], normalized(values[2])[:30], atol=1e-5)
    assert np.array_equal(np.isfinite(np.asarray(memory.index_values)), np.isfinite(np.asarray(memory.main)))


def test_ratio_two_pools_a_tail_with_the_row_that_closes_its_group():
    values = np.random.default_rng(1).standard_normal((4, 32)).astype(np.float32)
    # Request 0 starts at the odd position 3 (its partner is in the tail); request 1 closes rows 1 and 2.
    plan = CompressionPlan([0, 2, 4], [0, 1, -1], [3, 1, -1], [1, 0, 0], [3, 4], [1, -1], [2, -1])
    memory = compressed(2, plan, values)
    main = np.asarray(memory.main)
    assert np.argwhere(np.isfinite(main).all(axis=-1)).tolist() == [[3, 0], [4, 1]]
    # Zero gates against a tail score of 5: softmax weights.
    share = np.exp(5) / (np.exp(5) + 1)
    assert np.allclose(main[4, 1, :30], normalized(share * 5 + (1 - share) * values[0])[:30], atol=1e-5)
    assert np.allclose(main[3, 0, :30], normalized((values[1] + values[2]) / 2)[:30], atol=1e-5)
    other, tail = np.asarray(memory.tail_kv)
    assert (other == 5).all()
    assert np.allclose(tail[0, 0], values[3], atol=1e-6)
    assert (tail[1] == 5).all() and (tail[2] == 5).all() and (tail[0, 1] == 5).all()


def span(start: int, length: int, slot: int, **fields) -> Span:
    zeros = np.zeros(length, np.int32)
    return Span(start, zeros, zeros, slot, range(3), np.full(3, -1, np.int32), **fields)


def prepared(spans, phase="prefill", ring=16):
    loaded = model("five-layer")
    batch = batch_of(spans, loaded.setup.geometry, rows=40, requests=3)
    batch = jax.tree.map(jnp.asarray, batch)
    rows = prepare_rows(batch, loaded.params.plain, loaded.params.yarn, ring=ring, phase=phase)
    return {name: np.asarray(getattr(rows, name)) for name in Rows._fields if name not in ("plain", "yarn")}


def test_a_chunk_reads_the_ring_below_its_start_and_writes_its_last_rows():
    rows = prepared([span(5, 20, 0), span(0, 3, 1)])
    assert (rows["in_forward_from"][:20] == 5).all() and (rows["window_floor"][:23] == 0).all()
    assert rows["ring_rows"].tolist() == [False] * 4 + [True] * 16 + [True] * 3 + [False] * 17
    assert rows["in_forward_row"].tolist() == list(range(40))


def test_a_decode_row_reads_only_the_ring():
    rows = prepared([span(9, 1, 0), span(30, 1, 1)], phase="decode")
    assert rows["in_forward_from"][:2].tolist() == [10, 31] and rows["ring_rows"][:2].all()


def test_a_cold_rebuild_floors_every_window_at_its_start():
    rows = prepared([span(32, 20, 0, swa_replay_start=32, write_from=48)])
    assert (rows["window_floor"][:20] == 32).all() and (rows["in_forward_from"][:20] == 32).all()


def test_a_warm_back_off_leaves_rows_from_the_resume_point_as_if_it_had_not_happened():
    rows = prepared([span(20, 12, 0, swa_cached_until=27, cached_until=27, write_from=27)])
    recomputed = slice(0, 7)
    assert (rows["window_floor"][recomputed] == 20).all() and (rows["in_forward_from"][recomputed] == 20).all()
    assert (rows["window_floor"][7:12] == 0).all() and (rows["in_forward_from"][7:12] == 27).all()
    assert rows["ring_rows"][:12].tolist() == [False] * 7 + [True] * 5


@pytest.mark.parametrize("count", [1, 5, 8, 11])
def test_tiles_of_rows_give_what_all_rows_at_once_give(count):
    values = jnp.arange(count * 2.0).reshape(count, 2)
    (got,) = indexer._in_tiles(lambda parts: (parts[0] * 2 + parts[1][:, None],), (values, jnp.arange(count)), 4)
    assert np.array_equal(got, values * 2 + np.arange(count)[:, None])
