"""When rows are gathered and when each goes only where its experts are, against numbers counted by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from v41jax.layers.collectives import Parallel
from v41jax.layers.exchange_rule import PLACES_TILE, chance, decide, places_for

FULL = {"top_k": 6, "width": 5120, "expert_width": 2304, "activation_bytes": 2, "quantized": True}


def full(data, model, rows, exchange="auto"):
    """The full model's exchange."""
    return decide(Parallel(data, model, "data_model", exchange), rows, held=384 // (data * model), **FULL)


@pytest.mark.parametrize(("held", "experts", "top_k"), [(1, 5, 2), (2, 6, 3), (3, 7, 2), (4, 6, 3)])
def test_the_chance_of_a_chip_is_counted_over_all_choices(held, experts, top_k):
    choices = list(itertools.combinations(range(experts), top_k))
    hit = sum(any(expert < held for expert in choice) for choice in choices)
    assert chance(held, experts, top_k) == pytest.approx(hit / len(choices))


@pytest.mark.parametrize(("rows", "probability"), [(8, 0.1), (64, 0.09), (2048, 0.09), (2048, 0.4), (16384, 0.09)])
def test_uniform_rows_find_places_in_one_round(rows, probability):
    places = places_for(rows, probability)
    assert places == rows or places % PLACES_TILE == 0
    drawn = np.random.default_rng(0).binomial(rows, probability, 20_000)
    assert np.mean(drawn > places) < 2e-4
    assert places <= max(PLACES_TILE, 1.25 * rows * probability + 4 * np.sqrt(rows * probability) + PLACES_TILE)


def test_places_are_never_more_than_the_rows():
    assert places_for(5, 0.9) == 5
    assert places_for(100, 1.0) == 100


def test_decode_gathers_and_prefill_sends_rows_to_their_experts():
    assert [full(8, 8, rows).ragged for rows in (1, 64, 128, 256, 2048)] == [False, False, False, True, True]
    assert [full(32, 4, rows).ragged for rows in (1, 16, 64, 512)] == [False, False, True, True]


def test_bytes_of_the_full_model_are_those_counted_by_hand():
    prefill = full(8, 8, 2048)
    row = 5120 + 160 + 6 * 8 + 4 * 5120
    assert prefill.expected == pytest.approx(2048 * (1 - np.prod([(378 - i) / (384 - i) for i in range(6)])))
    assert (prefill.places, round(prefill.expected)) == (240, 186)
    assert prefill.ragged_bytes == pytest.approx(7 * 240 * row, rel=1e-6)
    assert prefill.gather_bytes == 7 * 2048 * (row + 1)


def test_more_rounds_never_send_much_more_than_a_gather():
    for rows in (256, 2048, 4096):
        exchange = full(8, 8, rows)
        rounds = -(-rows // exchange.places)
        assert rounds * exchange.ragged_bytes < exchange.gather_bytes * (1 + exchange.places / rows)


def test_an_exchange_may_be_forced_and_says_what_it_is():
    assert full(8, 8, 64, "ragged").ragged and not full(8, 8, 2048, "gather").ragged
    parallel = Parallel(8, 8, "data_model")
    assert (
        full(8, 8, 2048).describe(parallel) == "ragged (2048 rows a data shard: 240 places for each of 8, 186 expected)"
    )
    assert full(8, 8, 64).describe(parallel) == "gather (64 rows of each of 8 data shards to every chip)"
