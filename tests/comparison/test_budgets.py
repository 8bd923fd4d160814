"""Budget files, and measurements past them."""

import json

import numpy as np
import pytest

from v41jax.comparison.bisect import Bisection, Comparison
from v41jax.comparison.budgets import BudgetError, Budgets, past, read_budgets
from v41jax.comparison.metrics import EndDistance, SetDistance, ValueDistance

END = EndDistance(8, 1e-3, 2e-3, 0.1, 0.9999, 1e-4, 1e-3, 0.95, 2.0, 2.5)
VALUES = ValueDistance(1e-5, 1e-4, 3, 0, 1.0, 2e-5)
LAYERS = Bisection(
    [
        Comparison(2, "streams", VALUES, None, 8, 0, ()),
        Comparison(2, "topk", None, SetDistance(0.9, 1, np.nan, np.nan), 8, 0, (3,)),
    ],
    [],
    [],
)


def test_a_file_of_limits(tmp_path):
    text = "[end]\nkl_mean = 1e-3\n[operations.default]\nrelative_l2 = 1e-4\n[departures]\ncount = 0\n"
    (tmp_path / "b.toml").write_text(text)
    data = {"end": {"kl_mean": 1e-3}, "operations": {"default": {"relative_l2": 1e-4}}, "departures": {"count": 0}}
    (tmp_path / "b.json").write_text(json.dumps(data))
    wanted = Budgets({"kl_mean": 1e-3}, {"default": {"relative_l2": 1e-4}}, 0)
    assert read_budgets(tmp_path / "b.toml") == read_budgets(tmp_path / "b.json") == wanted


def test_all_faults_of_a_file_together(tmp_path):
    path = tmp_path / "b.toml"
    path.write_text('[end]\nkl = 1\ntop1 = "high"\n[operations.attention]\nspeed = 1\n[extra]\n')
    with pytest.raises(BudgetError) as error:
        read_budgets(path)
    assert len(error.value.faults) == 5


def test_measurements_past_their_budget():
    assert past(Budgets({"kl_mean": 1e-3, "top1": 0.9}, {"default": {"relative_l2": 1e-4}}), END, LAYERS) == []
    lines = past(
        Budgets({"kl_mean": 1e-5, "top1": 0.99, "nll_change": 0.1}, {"topk": {"overlap": 1.0}}, 0), END, LAYERS
    )
    assert [line.split(":")[0] for line in lines] == ["logits", "logits", "logits", "layer 2 topk"]
    assert "top1 0.95, the budget is at least 0.99" in lines[1]


def test_what_is_no_number_is_past_every_budget():
    broken = Comparison(0, "streams", ValueDistance(np.nan, 0, 0, 0, np.nan, 0), None, 1, 0, ())
    limits = Budgets({}, {"streams": {"relative_l2": 1.0, "cosine": 0.0}})
    assert len(past(limits, None, Bisection([broken], [], []))) == 2
