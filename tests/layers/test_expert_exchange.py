"""Which rows a round of the ragged exchange takes, and the experts of rows that arrived."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from v41jax.layers.collectives import Parallel
from v41jax.layers.expert_exchange import next_rows, own_experts, rows_of_shards

PARALLEL, ROWS, PLACES = Parallel(3, 2, "data_model"), 12, 4


@given(
    chips=st.lists(st.lists(st.integers(0, PARALLEL.chips - 1), min_size=2, max_size=2), min_size=ROWS, max_size=ROWS),
    valid=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    column=st.integers(0, PARALLEL.model - 1),
)
@settings(max_examples=60, deadline=None)
def test_rounds_send_every_row_once_to_each_of_its_shards_and_to_all_of_them_together(chips, valid, column):
    lists = rows_of_shards(jnp.array(chips), jnp.array(valid), column, PARALLEL, PLACES + 1)
    wanted = {
        (row, chip // PARALLEL.model)
        for row in range(ROWS)
        for chip in chips[row]
        if valid[row] and chip % PARALLEL.model == column
    }
    sent, start, rounds = [], 0, 0
    while start < ROWS:
        places, stop = (np.asarray(part) for part in next_rows(lists, jnp.int32(start), PLACES, ROWS))
        assert (np.diff(places, axis=1) > 0).all(), "ascending and distinct, empty places too"
        found = [(int(row), shard) for shard, rows in enumerate(places) for row in rows if row < ROWS]
        assert all(start <= row < stop for row, _ in found)
        assert stop >= min(ROWS, start + PLACES)
        sent += found
        start, rounds = int(stop), rounds + 1
    assert sorted(sent) == sorted(wanted)
    assert rounds <= -(-ROWS // PLACES)


def test_arrived_rows_name_this_chips_experts_first():
    ids = jnp.array([[0, 4, 5, 9], [4, 5, 6, 7], [-1, -1, -1, -1], [1, 2, 3, 7]])
    weights = jnp.arange(16, dtype=jnp.float32).reshape(4, 4)
    own, factors = own_experts(ids, weights, 4, 4)
    assert own.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3], [-1] * 4, [3, -1, -1, -1]]
    assert [factors[0, 0], factors[0, 1], factors[1, 3], factors[3, 0]] == [1, 2, 7, 15]
    assert own_experts(ids, weights, 4, 2)[0].tolist() == [[0, 1], [0, 1], [-1, -1], [-1, -1]]
