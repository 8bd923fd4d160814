"""`BatchStep` arrays against a row-by-row construction from the specification's rules."""

import dataclasses
import random

import numpy as np
import pytest

from scheduler.batch import DEAD, Preparation
from scheduler.batch_builder import BatchError, build_batch_step
from scheduler.buckets import Buckets
from scheduler.planning import replay_fields
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.scheduled_batch import Phase, ScheduledBatch, StepResult, resolve_pending
from scheduler.sequence import PLACEHOLDER, SamplingParams
from scheduler.states import StateMaintenanceOps
from tests.helpers.stub_runner import compress_ids

GEOMETRY = V41PoolGeometry(
    layers=12, owners=((2, 2), (4, 2), (6, 1)), block_size=32, window_size=16, head_dim=64, index_dim=32
)
BUCKETS = Buckets((1, 2, 4, 8), (128, 256), (4, 8), (4, 16), (16,))
PAGES, SLOTS = 64, 8


def make_batch(spans, phase=Phase.PREFILL, decoder_replay=True, **changes):
    """A batch of (start, resume, end, is_final, rebuild) spans with arbitrary ids."""
    rng = np.random.default_rng(len(spans))
    fields = [replay_fields(start, resume, rebuild) for start, resume, _, _, rebuild in spans]
    columns = np.asarray(fields, np.int32).reshape(-1, 5)
    ends = np.asarray([span[2] for span in spans], np.int32)
    lengths = -(-ends // GEOMETRY.block_size)
    tables = np.zeros((len(spans), int(lengths.max(initial=1))), np.int32)
    pages = iter(rng.permutation(PAGES).tolist())
    for row, length in enumerate(lengths):
        tables[row, :length] = [next(pages) for _ in range(length)]
    rows = int(sum(span[2] - span[0] for span in spans))
    values = {
        "index": 0,
        "phase": phase,
        "request_ids": tuple(range(len(spans))),
        "generations": (1,) * len(spans),
        "slots": rng.permutation(SLOTS)[: len(spans)].astype(np.int32),
        "starts": np.asarray([span[0] for span in spans], np.int32),
        "resumes": np.asarray([span[1] for span in spans], np.int32),
        "ends": ends,
        "is_final": np.asarray([span[3] for span in spans], np.bool_),
        "preparation": columns[:, 0].copy(),
        "write_from": columns[:, 1].copy(),
        "cached_until": columns[:, 2].copy(),
        "swa_cached_until": columns[:, 3].copy(),
        "swa_replay_start": columns[:, 4].copy(),
        "history": rng.integers(0, 90, (len(spans), 3)).astype(np.int32),
        "token_ids": rng.integers(0, 400, rows).astype(np.int32),
        "image_rows": np.zeros(rows, np.bool_),
        "block_tables": tables,
        "table_lengths": lengths.astype(np.int32),
        "sampling": (SamplingParams(),) * len(spans),
        "output_positions": (0,) * len(spans),
        "images": ((),) * len(spans),
        "decoder_replay": decoder_replay,
        "ops": StateMaintenanceOps(),
    }
    return ScheduledBatch(**{**values, **changes})


def build(batch):
    return build_batch_step(batch, GEOMETRY, BUCKETS, compress_ids, num_pages=PAGES, num_slots=SLOTS)


def random_spans(rng):
    spans = []
    for _ in range(rng.randint(1, 5)):
        kind = rng.choice(("plain", "backoff", "rebuild"))
        length = rng.choice((1, 2, 3, 7, rng.randint(1, 40)))
        if kind == "rebuild":
            resume = 32 * rng.randint(1, 4)
            spans.append((resume - 32, resume, resume + length, rng.random() < 0.5, True))
        elif kind == "backoff":
            resume = rng.randint(1, 120)
            spans.append((max(0, (resume // 32 - 1) * 32), resume, resume + length, rng.random() < 0.8, False))
        else:
            resume = rng.randint(0, 120)
            spans.append((resume, resume, resume + length, rng.random() < 0.5, False))
    return spans


def slow_plan(batch, ratio, depth):
    """Every group and tail row by the words of "Compression plans", one row at a time."""
    closes, tails, row = [], [], 0
    for request, (start, end) in enumerate(zip(batch.starts.tolist(), batch.ends.tolist())):
        write_from, cached_until = int(batch.write_from[request]), int(batch.cached_until[request])
        warm = batch.preparation[request] == Preparation.REWIND
        for position in range(start, end):
            if (position + 1) % ratio == 0 and position >= write_from:
                base = write_from if warm else start
                closes.append((row, request, position, ratio - min(position - base + 1, ratio)))
            if depth and position >= end - depth and position >= cached_until:
                tails.append((row, request, position))
            row += 1
    return closes, tails


def test_plans_equal_a_row_by_row_construction():
    rng = random.Random(5)
    straddling = 0
    for _ in range(300):
        batch = make_batch(random_spans(rng))
        step, shape = build(batch)
        for ratio, plan in zip(GEOMETRY.ratios, step.plans, strict=True):
            closes, tails = slow_plan(batch, ratio, 0 if ratio == 1 else 2)
            fields = (plan.closing_rows, plan.requests, plan.positions, plan.from_tail)
            assert list(zip(*(field[: len(closes)].tolist() for field in fields))) == closes
            assert len(plan.closing_rows) == shape.rows // ratio + shape.requests
            for field, fill in zip(fields, (shape.rows, -1, -1, 0), strict=True):
                assert (field[len(closes) :] == fill).all()
                assert field.dtype == np.int32
            fields = (plan.tail_rows, plan.tail_requests, plan.tail_positions)
            assert list(zip(*(field[: len(tails)].tolist() for field in fields))) == tails
            for field, fill in zip(fields, (shape.rows, -1, -1), strict=True):
                assert (field[len(tails) :] == fill).all()
            if ratio == 1:
                assert len(plan.tail_rows) == 0
            straddling += sum(close[3] for close in closes)
    assert straddling > 50


def test_a_straddling_group_takes_its_cached_half_from_the_tail():
    # Resume at 33 after a back-off to 0: the group (32, 33) closes with its first member from the tail.
    step, _ = build(make_batch([(0, 33, 36, True, False)]))
    plan = step.plans[1]
    assert plan.positions[:2].tolist() == [33, 35]
    assert plan.from_tail[:2].tolist() == [1, 0]
    assert plan.tail_positions[:2].tolist() == [34, 35]


def test_row_arrays_and_padding():
    batch = make_batch([(0, 0, 5, True, False), (64, 64, 67, False, False)])
    step, shape = build(batch)
    assert (shape.rows, shape.requests, shape.pages, shape.outputs, shape.tail) == (128, 4, 4, 1, True)
    assert step.positions[:8].tolist() == [0, 1, 2, 3, 4, 64, 65, 66]
    assert step.batch_ids[:8].tolist() == [0] * 5 + [1] * 3
    assert step.cu_seqlens.tolist() == [0, 5, 8, 8, 8]
    assert step.token_ids[:8].tolist() == batch.token_ids.tolist()
    assert step.compressed_ids[:8].tolist() == compress_ids(batch.token_ids).tolist()
    assert step.output_rows.tolist() == [4]
    assert step.is_final.tolist() == [True, False, False, False]
    assert step.forward_start.tolist() == [0, 64, 0, 0]
    assert (step.batch_ids[8:] == -1).all()
    assert (step.compressed_ids[8:] == DEAD).all()
    for field in (step.positions[8:], step.token_ids[8:], step.slots[2:], step.block_tables[2:]):
        assert (field == 0).all()
    assert (step.preparation[2:] == Preparation.CONTINUE).all()
    for value in step:
        if isinstance(value, np.ndarray) and value.dtype != np.bool_:
            assert value.dtype == np.int32


def test_image_rows_and_pending_tokens_are_dead():
    tokens = np.asarray([498, 498, 7, 8], np.int32)
    images = np.asarray([True, True, False, False])
    step, _ = build(make_batch([(0, 0, 4, True, False)], token_ids=tokens, image_rows=images))
    assert step.compressed_ids[:4].tolist() == [DEAD, DEAD, *compress_ids(tokens[2:]).tolist()]
    assert step.image_rows[:5].tolist() == [True, True, False, False, False]
    pending = np.asarray([PLACEHOLDER], np.int32)
    step, shape = build(make_batch([(40, 40, 41, True, False)], Phase.DECODE, token_ids=pending))
    assert (step.token_ids[0], step.compressed_ids[0]) == (-1, DEAD)
    assert (shape.rows, shape.requests, shape.query_width, shape.tail) == (1, 1, 1, False)
    assert step.tail is None


def test_history_is_compressed_and_dead_stays_dead():
    history = np.asarray([[DEAD, 5, 6]], np.int32)
    step, _ = build(make_batch([(64, 96, 99, True, True)], history=history))
    assert step.history[0].tolist() == [DEAD, *compress_ids(np.asarray([5, 6])).tolist()]


def test_tail_plan_lists_the_last_window_of_every_finishing_request():
    spans = [(0, 0, 5, True, False), (32, 32, 40, False, False), (32, 64, 70, True, True), (3, 3, 60, True, False)]
    step, shape = build(make_batch(spans))
    assert shape.outputs == 4
    tail, capacity = step.tail, 4 * 16
    assert len(tail.rows) == len(tail.floor) == shape.decoder_rows(16) == capacity
    rows = [*range(5), *range(5 + 8 + 22, 5 + 8 + 38), *range(51 + 41, 51 + 57)]
    assert tail.rows.tolist() == rows + [shape.rows] * (capacity - 37)
    assert tail.floor.tolist() == [0] * 5 + [54] * 16 + [44] * 16 + [0] * (capacity - 37)
    assert tail.last.tolist() == [4, 20, 36, capacity]
    assert tail.rows[tail.last[:3]].tolist() == step.output_rows[:3].tolist()
    assert step.output_rows.tolist() == [4, 50, 107, shape.rows]
    assert all(field.dtype == np.int32 for field in tail)


def test_decoder_rows_never_exceed_the_rows_of_the_step():
    step, shape = build(make_batch([(0, 0, 10, True, False)] * 5))
    assert (shape.rows, shape.outputs) == (256, 8)
    assert [shape.decoder_rows(window) for window in (8, 16, 32, 33)] == [64, 128, 256, 256]
    assert step.tail.rows.tolist() == [*range(50), *[256] * 78]
    assert step.tail.last.tolist() == [9, 19, 29, 39, 49, 128, 128, 128]


def test_a_step_without_a_finishing_request_has_an_empty_tail():
    step, shape = build(make_batch([(0, 0, 40, False, False)]))
    assert (shape.outputs, shape.tail) == (0, True)
    assert [len(field) for field in step.tail] == [0, 0, 0]
    assert step.output_rows.shape == (0,)


def test_without_decoder_replay_there_is_no_tail_plan():
    step, shape = build(make_batch([(0, 0, 40, True, False)], decoder_replay=False))
    assert step.tail is None
    assert not shape.tail


def test_decode_capacities():
    step, shape = build(make_batch([(40, 40, 41, True, False)] * 3, Phase.DECODE))
    assert (shape.requests, shape.rows, shape.outputs, shape.pages) == (4, 4, 4, 16)
    assert [len(plan.closing_rows) for plan in step.plans] == [4, 4]
    assert [len(plan.tail_rows) for plan in step.plans] == [0, 4]


def test_every_call_makes_fresh_arrays():
    batch = make_batch([(0, 0, 5, True, False)])
    first, second = build(batch)[0], build(batch)[0]
    first.token_ids[:] = 0
    first.block_tables[:] = -7
    assert second.token_ids[:5].tolist() == batch.token_ids.tolist()
    assert (second.block_tables >= 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"slots": np.asarray([3, 3], np.int32)}, "not unique"),
        ({"slots": np.asarray([3, 8], np.int32)}, "leave 0..7"),
        ({"slots": np.asarray([-1, 3], np.int32)}, "leave 0..7"),
        ({"ends": np.asarray([40, 60], np.int32)}, "spans cover"),
        ({"starts": np.asarray([40, 0], np.int32)}, "empty span"),
        ({"starts": np.asarray([-1, 1], np.int32)}, "starts at position -1"),
        ({"table_lengths": np.asarray([1, 2], np.int32)}, "2 are needed"),
        ({"block_tables": np.asarray([[1, 64], [2, 3]], np.int32)}, "page id leaves 0..63"),
        ({"block_tables": np.asarray([[1, -1], [2, 3]], np.int32)}, "page id leaves 0..63"),
    ],
)
def test_faulty_batches_are_refused(changes, words):
    batch = make_batch([(0, 0, 40, True, False), (0, 0, 40, True, False)])
    with pytest.raises(BatchError, match=words):
        build(dataclasses.replace(batch, **changes))


def test_a_batch_past_the_ladders_names_both_numbers():
    with pytest.raises(ValueError, match="300 prefill rows, the ladder ends at 256"):
        build(make_batch([(0, 0, 300, True, False)]))


def test_a_decode_row_wider_than_the_bucket_is_refused():
    with pytest.raises(BatchError, match="2 rows exceeds the query width 1"):
        build(make_batch([(40, 40, 42, True, False)], Phase.DECODE))


def test_a_scheduled_batch_is_read_only():
    batch = make_batch([(0, 0, 5, True, False)])
    with pytest.raises(ValueError, match="read-only"):
        batch.token_ids[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.index = 3


def test_pending_tokens_are_matched_by_request_and_generation():
    spans = [(40, 40, 41, True, False)] * 3
    previous = make_batch(spans, Phase.DECODE, request_ids=("a", "b", "c"), generations=(1, 2, 1))
    pending = np.asarray([PLACEHOLDER, 9, PLACEHOLDER], np.int32)
    batch = make_batch(spans, Phase.DECODE, request_ids=("c", "x", "b"), generations=(1, 1, 2), token_ids=pending)
    filled = resolve_pending(batch, previous, StepResult([11, 12, 13]))
    assert filled.token_ids.tolist() == [13, 9, 12]
    assert batch.token_ids.tolist() == pending.tolist()
    stale = dataclasses.replace(batch, generations=(1, 1, 3))
    with pytest.raises(RuntimeError, match="'b' generation 3"):
        resolve_pending(stale, previous, StepResult([11, 12, 13]))
