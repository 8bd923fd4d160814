"""Ten planted faults, each found at its layer and operation; without one, nothing departs."""

import pytest

from tests.comparison.conftest import UNTIL
from tests.comparison.planted import FAULTS
from v41jax.comparison.bisect import bisect, tolerances


@pytest.fixture(scope="module")
def expected(sides, prompt):
    return sides("reference").observe(prompt, until=UNTIL)


def located(left, subject, sides, prompt):
    made = subject.observe(prompt, left, until=UNTIL)
    precision = subject.options.precision
    return bisect(left, made, subject.config, precision, tolerances(precision, precision))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_located_at_its_operation(fault, expected, sides, prompt, monkeypatch):
    plant, layer, operation = FAULTS[fault]
    subject = sides("xla:weights=stored")
    plant(monkeypatch, subject)
    found = located(expected, subject, sides, prompt)
    assert found.first is not None, "nothing was found"
    assert (found.first.layer, found.first.operation) == (layer, operation)
    assert found.first.rows and found.first.what


def test_nothing_departs_without_a_fault(expected, sides, prompt):
    found = located(expected, sides("xla:weights=stored"), sides, prompt)
    assert found.departures == [] and found.flips == []
    assert {item.layer for item in found.comparisons} == {-1, 0, 1, 2}
    assert len(found.comparisons) > 80
