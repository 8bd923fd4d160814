"""Rows by part of the model, from plans and shapes alone."""

import pytest

from scheduler.buckets import StepShape
from scheduler.scheduled_batch import Phase
from tests.scheduler.test_batch_builder import make_batch
from v41jax.row_counts import RowCounts, computed_rows_per_layer, rows_per_layer

SPANS = [(0, 0, 5, True, False), (32, 32, 72, False, False), (32, 64, 70, True, True)]


def test_a_replayed_step_runs_the_decoder_on_tails_and_the_last_layer_on_last_rows():
    assert rows_per_layer(make_batch(SPANS), 16) == RowCounts(encoder=83, published=83, decoder=5 + 16, last=2)
    assert rows_per_layer(make_batch(SPANS[1:2]), 16) == RowCounts(encoder=40, published=40)


def test_without_replay_and_in_decode_every_row_runs_every_layer():
    assert rows_per_layer(make_batch(SPANS, decoder_replay=False), 16) == RowCounts(83, 83, 83, 83)
    decode = make_batch([(40, 40, 41, True, False)] * 3, Phase.DECODE)
    assert rows_per_layer(decode, 16) == RowCounts(3, 3, 3, 3)


@pytest.mark.parametrize("rows", [128, 1024, 16384])
def test_the_last_chunk_costs_the_decoder_the_same_whatever_its_size(rows):
    final = StepShape(Phase.PREFILL, rows, 1, 4, outputs=1, query_width=rows, tail=True)
    assert computed_rows_per_layer(final, 128) == RowCounts(rows, rows, decoder=128, last=1)
    assert computed_rows_per_layer(final._replace(outputs=0), 128) == RowCounts(rows, rows)
    assert computed_rows_per_layer(final._replace(tail=False), 128) == RowCounts(rows, rows, rows, rows)


def test_sums_and_products_with_layers():
    total = RowCounts(100, 100, 12, 1).plus(RowCounts(1, 1, 1, 1))
    assert total == RowCounts(101, 101, 13, 2)
    # 20 encoder layers, 19 decoder layers, the last.
    assert total.layer_rows(layers=40, boundary=20) == 101 * 20 + 13 * 19 + 2
