"""Calibration of confidences and the choice of verification lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from v41jax.confidence import (
    TEMPERATURES,
    Blocks,
    calibration_error,
    choose_lengths,
    confidences_of,
    fit_temperatures,
    reliability,
    round_up_lengths,
    step_rates,
    survival,
)

ONES = np.ones(5)
RATES = [100, 100, 100, 98, 95, 90, 84, 78, 72, 66, 60, 55, 50]
CONFIDENCES = [[0.9, 0.8, 0.7, 0.6, 0.5], [0.5, 0.5, 0.4, 0.3, 0.2]]


def test_the_published_example():
    values = survival(CONFIDENCES, ONES)
    np.testing.assert_allclose(values[0], [0.9, 0.72, 0.504, 0.3024, 0.1512], rtol=1e-12)
    np.testing.assert_allclose(values[1], [0.5, 0.25, 0.1, 0.03, 0.006], rtol=1e-12)
    assert choose_lengths(values, RATES).tolist() == [3, 1]


def test_temperatures_sharpen_or_soften_and_certainty_stays_finite():
    assert survival([[0.8]], [0.5])[0, 0] == pytest.approx(16 / 17)
    assert survival([[0.8]], [2.0])[0, 0] == pytest.approx(2 / 3)
    assert survival([[1.0, 0.0]], [1.0, 1.0])[0] == pytest.approx([1 - 1e-6, 1e-6])
    assert confidences_of([-800.0, 0.0, 800.0]).tolist() == [0.0, 0.5, 1.0]


def published_choice(survivals, rates, limits):
    """The specification's loop, word for word."""
    count = len(survivals)
    flat = sorted(
        ((value, -place, -request) for request, row in enumerate(survivals) for place, value in enumerate(row)),
        reverse=True,
    )
    flat = [(value, -request) for value, place, request in flat if -place < limits[-request]]

    def theta(admitted):
        total = count + sum(value for value, _ in flat[:admitted])
        return total * rates[min(count + admitted, len(rates) - 1)]

    admitted = 0
    while admitted < len(flat) and theta(admitted + 1) > theta(admitted):
        admitted += 1
    return [sum(request == chosen for _, chosen in flat[:admitted]) for request in range(count)]


eighths = st.integers(1, 8).map(lambda value: value / 8)


@given(
    st.lists(st.lists(eighths, min_size=5, max_size=5), min_size=1, max_size=5),
    st.lists(st.integers(1, 64), min_size=1, max_size=40),
    st.data(),
)
def test_lengths_are_the_published_ones_and_admit_prefixes(confidences, rates, data):
    # Eighths and whole rates keep sums exact; equal survivals occur often.
    survivals = np.cumprod(confidences, axis=1)
    rates = sorted(rates, reverse=True)
    limits = data.draw(st.lists(st.integers(0, 5), min_size=len(confidences), max_size=len(confidences)))
    lengths = choose_lengths(survivals, rates, limits)
    assert lengths.tolist() == published_choice(survivals.tolist(), rates, limits)
    assert (lengths <= limits).all()


@given(
    st.lists(st.lists(eighths, min_size=3, max_size=3), min_size=1, max_size=4),
    st.lists(st.integers(1, 64), min_size=1, max_size=20),
    st.data(),
)
def test_over_data_shards_a_step_costs_the_rows_of_the_largest(confidences, rates, data):
    survivals = np.cumprod(confidences, axis=1)
    count, rates = len(confidences), sorted(rates, reverse=True)
    homes = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    limits = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    lengths = choose_lengths(survivals, rates, limits, homes)
    assert (lengths <= limits).all()

    def admitted(level):
        """Lengths, and tokens per second, when no shard may have more rows than the level."""
        chosen = [0] * count
        for shard in set(homes):
            mine = [request for request in range(count) if homes[request] == shard]
            flat = sorted((-survivals[r][place], place, r) for r in mine for place in range(limits[r]))
            for _, _, request in flat[: level - len(mine)]:
                chosen[request] += 1
        expected = count + sum(survivals[request][:length].sum() for request, length in enumerate(chosen))
        return chosen, expected * rates[min(level, len(rates) - 1)]

    most = max(homes.count(shard) + sum(limits[r] for r in range(count) if homes[r] == shard) for shard in set(homes))
    level = max(homes.count(shard) for shard in set(homes))
    while level < most and admitted(level + 1)[1] > admitted(level)[1]:
        level += 1
    assert lengths.tolist() == admitted(level)[0]


def test_free_rows_verify_everything_and_dear_ones_nothing():
    values = survival(CONFIDENCES, ONES)
    assert choose_lengths(values, [50.0]).tolist() == [5, 5]
    assert choose_lengths(values, [100, 100, 100, 1]).tolist() == [0, 0]
    assert choose_lengths(np.zeros((0, 5)), [1.0]).tolist() == []


def test_widths_are_rounded_up_to_a_compiled_one():
    assert [round_up_lengths([0, length], (0, 2, 5)) for length in range(6)] == [0, 2, 2, 5, 5, 5]
    with pytest.raises(ValueError, match=r"6 proposals exceed the compiled widths \[0, 2, 5\]"):
        round_up_lengths([6], (0, 2, 5))


def test_rates_are_interpolated_held_flat_outside_and_never_rise():
    assert step_rates([4, 2], [60.0, 100.0], 6).tolist() == [100, 100, 100, 80, 60, 60, 60]
    # A faster measurement at more rows is noise.
    assert step_rates([1, 3, 5], [10.0, 12.0, 6.0], 5).tolist() == [10, 10, 10, 10, 8, 6]
    for rows, rates in (([], []), ([1, 1], [2.0, 1.0]), ([1], [0.0]), ([1], [np.inf]), ([1, 2], [1.0])):
        with pytest.raises(ValueError, match="step rates"):
            step_rates(rows, rates, 4)


def simulated(count, temperatures, seed=0):
    """Blocks whose proposals survive with the calibrated confidences of known temperatures."""
    rng = np.random.default_rng(seed)
    confidences = rng.uniform(0.05, 0.95, (count, 5))
    logits = np.log(confidences / (1 - confidences)) / temperatures
    survives = rng.random((count, 5)) < confidences_of(logits)
    offered = rng.integers(0, 6, count)
    accepted = np.minimum(np.cumprod(survives, axis=1).sum(axis=1), offered)
    return Blocks(confidences, offered, accepted, rng.integers(0, 48, count))


def test_a_fit_recovers_temperatures_and_improves_held_out_blocks():
    truth = np.array([2.0, 0.5, 1.0, 1.6, 0.7])
    fit, held_out = simulated(60_000, truth).split(1 / 3)
    assert not set(fit.requests) & set(held_out.requests) and len(set(held_out.requests)) == 16
    found = fit_temperatures(fit)
    assert np.abs(np.log(found / truth))[:3].max() < 0.25
    before, after = reliability(held_out, ONES), reliability(held_out, found)
    for place in range(3):
        assert after[place].calibration_error < 0.5 * before[place].calibration_error + 0.01
    assert np.mean([place.brier for place in after]) < np.mean([place.brier for place in before])
    for place, report in enumerate(after):
        assert report.blocks == report.counts.sum() == (held_out.offered > place).sum()
        used = report.counts > 50
        assert np.abs(report.predicted - report.observed)[used].max() < 0.15


def test_what_was_not_offered_is_not_a_rejection():
    blocks = simulated(3_000, ONES)
    garbage = np.where(np.arange(5) < blocks.offered[:, None], blocks.confidences, 0.999)
    changed = Blocks(garbage, blocks.offered, blocks.accepted, blocks.requests)
    assert np.array_equal(fit_temperatures(changed), fit_temperatures(blocks))
    first_only = Blocks(
        blocks.confidences, np.minimum(blocks.offered, 1), np.minimum(blocks.accepted, 1), blocks.requests
    )
    found = fit_temperatures(first_only)
    assert found[0] == fit_temperatures(blocks)[0] and found[1:].tolist() == [1, 1, 1, 1]


def test_ties_go_to_the_temperature_nearest_one():
    assert TEMPERATURES[80] == 1.0 and TEMPERATURES[[0, -1]].tolist() == [0.25, 4.0] and TEMPERATURES.size == 161
    # At one half every temperature predicts one half.
    blocks = Blocks(np.full((4, 1), 0.5), np.ones(4), [1, 0, 1, 0], np.arange(4))
    assert fit_temperatures(blocks).tolist() == [1.0]


def test_the_calibration_error_of_a_hand_made_case():
    # Bins of 1/15: {.05, .06} and {.95}; gaps |.055 - .5| and |.95 - 1|.
    error = calibration_error(np.array([0.05, 0.06, 0.95]), np.array([True, False, True]))
    assert error == pytest.approx((abs(0.11 - 1) + abs(0.95 - 1)) / 3)


def test_a_report_without_blocks_says_so():
    empty = Blocks(np.zeros((1, 2)), [0], [0], [0])
    for place in reliability(empty, [1.0, 1.0]):
        assert place.blocks == 0 and np.isnan(place.calibration_error) and np.isnan(place.brier)


def test_impossible_blocks_are_refused_with_every_fault():
    with pytest.raises(ValueError, match=r"offered must lie in 0\.\.2; accepted must lie in 0\.\.offered"):
        Blocks(np.zeros((1, 2)), [3], [4], [0])
    with pytest.raises(ValueError, match=r"accepted has shape \(2,\) for 1 blocks; confidences must lie in 0\.\.1"):
        Blocks(np.full((1, 2), 2.0), [1], [1, 1], [0])
