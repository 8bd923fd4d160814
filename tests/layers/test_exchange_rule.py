"""When rows are gathered and when each goes only where its experts are, against numbers counted by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from v41jax.layers.collectives import Parallel
from v41jax.layers.exchange_rule import PLACES_TILE, chance, decide, places_for, rounds_for

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


def rounds_taken(routed, places):
    """Rounds of the loop for lists [lists, n] of which rows go where: the next rows up to the first without a place."""
    start, rounds = 0, 0
    while start < routed.shape[1]:
        full = np.cumsum(routed[:, start:], axis=1) > places
        crowded = full.any(axis=0)
        start += int(crowded.argmax()) if crowded.any() else len(crowded)
        rounds += 1
    return rounds


@pytest.mark.parametrize(
    ("rows", "probability", "places", "lists"),
    [(64, 0.25, 16, 4), (64, 0.25, 24, 32), (128, 0.1, 16, 8), (64, 0.5, 16, 2), (96, 0.05, 16, 64), (12, 0.9, 16, 8)],
)
def test_the_expected_rounds_bound_those_that_uniform_routing_takes(rows, probability, places, lists):
    random = np.random.default_rng(1)
    taken = [rounds_taken(random.random((lists, rows)) < probability, places) for _ in range(400)]
    bound = rounds_for(rows, probability, places, lists)
    assert np.mean(taken) <= bound + 3 * np.std(taken) / 20
    assert 1 <= bound <= -(-rows // places)
    assert bound - np.mean(taken) < 1.1


def test_places_that_hold_all_rows_take_one_round():
    assert rounds_for(16, 0.3, 16, 4096) == 1
    assert rounds_for(17, 1.0, 16, 1) == 2


@pytest.mark.parametrize("data", [2, 4, 8, 16, 32, 64])
def test_what_is_taken_pays_with_one_more_round_than_expected(data):
    for model, rows in itertools.product((1, 2, 4, 8), (8, 32, 64, 128, 256, 512, 1024, 4096, 16384)):
        if 384 % (data * model):
            continue
        exchange = full(data, model, rows)
        experts = 384 // (data * model) * 3 * 5120 * 2304 * 17 / 32
        least = 2 * exchange.ragged_bytes + experts / 4
        assert not exchange.ragged or least < exchange.gather_bytes, (model, rows)
        assert exchange.ragged or (exchange.rounds > 1.0001 or least >= exchange.gather_bytes), (model, rows)


def test_shapes_that_another_round_would_make_dearer_than_a_gather_are_gathered():
    shapes = ((4, 2, 16384), (2, 8, 8192), (4, 4, 4096), (8, 1, 8192), (4, 8, 1024), (8, 4, 512), (16, 4, 128))
    for data, model, rows in (*shapes, (32, 2, 64), (16, 8, 64), (64, 2, 32)):
        exchange = full(data, model, rows)
        experts = 384 // (data * model) * 3 * 5120 * 2304 * 17 / 32
        assert exchange.ragged_bytes + experts / 4 < exchange.gather_bytes, "one round and its experts would pay"
        assert not exchange.ragged, (data, model, rows)


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
        full(8, 8, 2048).describe(parallel)
        == "ragged (2048 rows a data shard: 240 places for each of 8, 186 expected, 1.01 rounds)"
    )
    assert full(8, 8, 64).describe(parallel) == "gather (64 rows of each of 8 data shards to every chip)"
