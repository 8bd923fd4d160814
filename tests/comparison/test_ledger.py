"""Every approximation is within its budget, on a tiny checkpoint, and the page has a line for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.synthesize import synthesize
from v41jax.comparison import ledger

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGETS = ROOT / "docs" / "numerics_budgets.toml"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ledger") / "pico"
    config = ledger.ledger_config()
    synthesize(directory, config, seed=7, scopes=("text",))
    budgets = ledger.read_ledger_budgets(BUDGETS)
    return ledger.measure(directory, ledger.random_prompts(config)[:1], budgets)


def test_every_approximation_is_within_its_budget(measured):
    assert [line for item in measured for line in item.past_budget] == []


def test_every_approximation_has_a_budget_and_a_line():
    keys = [entry.key for entry in ledger.ENTRIES]
    assert list(ledger.read_ledger_budgets(BUDGETS)) == keys
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    for entry in ledger.ENTRIES:
        assert f"| {entry.name} | `{entry.left}` | `{entry.right}` |" in page


def test_exact_approximations_are_exact_and_others_are_not(measured):
    distance = {item.entry.key: item for item in measured}
    assert distance["packed"].end.logits_max == 0
    assert distance["sum_order"].end.logits_max < 1e-5
    assert distance["chunks"].end.logits_mean < distance["decoder_replay"].end.logits_mean
    assert distance["fp8_index"].layer_l2 > 0


def test_unknown_entries_of_a_budgets_file_are_refused(tmp_path):
    path = tmp_path / "b.toml"
    path.write_text("[speed]\nkl_mean = 1\n")
    with pytest.raises(ValueError, match="no entry speed"):
        ledger.read_ledger_budgets(path)
