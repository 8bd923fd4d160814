"""The ledger of docs/numerics.md: measured again within its budgets, and a planted loss is past them."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from v41jax import quantization_numpy as codecs
from v41jax.cli import app
from v41jax.comparison.budgets import BudgetError
from v41jax.comparison.ledger import BY_KEY, ENTRIES
from v41jax.comparison.ledger_page import BEGIN, END, read_ledger_budgets, with_table
from v41jax.reference import replay_oracle

ROOT = Path(__file__).resolve().parent.parent.parent
BUDGETS = ROOT / "docs" / "ledger" / "budgets.toml"
NANO = ("--model", str(ROOT / "checkpoints" / "nano"), "--ledger", "--continuation", "64")
TEXT = ("--prompts", str(ROOT / "docs" / "ledger" / "prompts.jsonl"))
# Each of these compiles the model once or twice more: the first is held in tests/test_bounded_replay.py, the last in
# tests/acceptance/test_speculation.py, and the other is the row above it with the index plane of tests/comparison.
COMPILED_ELSEWHERE = ("xla_replay", "xla_released_fp8", "drafts")
MEASURED = [entry.key for entry in ENTRIES if entry.key not in COMPILED_ELSEWHERE]


def run(*arguments):
    return CliRunner().invoke(app, ["compare", *NANO, *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Distances by key, as the command of the page has them."""
    file = tmp_path_factory.mktemp("ledger") / "seen.json"
    result = run(*TEXT, "--only", ",".join(MEASURED), "--budgets", str(BUDGETS), "--json", str(file))
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert report["past_budget"] == [] and report["origin"]["jax"]
    return {row["entry"]["key"]: row["end"] for row in report["rows"]}


def test_every_approximation_is_within_its_budget_and_none_is_free(measured):
    assert list(measured) == MEASURED
    for key, end in measured.items():
        assert end["logits_mean"] > (1e-8 if key == "xla" else 1e-4), key


def test_costs_are_ordered_as_they_must_be(measured):
    cost = {key: end["logits_mean"] for key, end in measured.items()}
    assert cost["bf16_scores"] < cost["bf16_activations"]
    assert cost["fp8_index"] < cost["fp4_index"]
    assert max(cost["decoder_replay"], cost["encoder_replay"]) < 2 * cost["both_replays"]
    assert max(cost[key] for key in ("quantized_activations", "fp4_main", "fp8_window")) < cost["released"]
    assert cost["xla_released"] < cost["released"]


def test_the_page_has_every_row_with_its_present_budget():
    page = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    budgets = read_ledger_budgets(BUDGETS)
    assert list(budgets) == list(BY_KEY)
    assert [row.split("|")[1].strip() for row in rows] == [entry.name for entry in ENTRIES]
    for row, (key, budget) in zip(rows, budgets.items(), strict=True):
        shown = [float(limit) for limit in re.findall(r"\([≤≥] ([^)]*)\)", row)]
        limits = [budget.end.end[name] for name in ("logits_mean", "kl_mean", "top1", "nll_change") if key != "drafts"]
        assert shown == (limits or [budget.tokens_differing]), key
        assert limits or shown == [0]


def coarse_scales(monkeypatch):
    """FP4 scales four times as large as the largest value of a block needs."""
    monkeypatch.setattr(codecs, "RECIPROCAL_6", 4 * codecs.RECIPROCAL_6)


def saturated_windows(monkeypatch):
    """FP8 scales with which the largest values of a block saturate."""
    monkeypatch.setattr(codecs, "RECIPROCAL_448", codecs.RECIPROCAL_448 / 2)


def half_windows(monkeypatch):
    """The forwards of a replay see half of their windows."""
    whole = replay_oracle.layer_visibility
    monkeypatch.setattr(
        replay_oracle, "layer_visibility", lambda *given, window, **rest: whole(*given, window=window // 2, **rest)
    )


@pytest.mark.parametrize(
    ("plant", "key"),
    [(coarse_scales, "fp4_main"), (saturated_windows, "fp8_window"), (half_windows, "decoder_replay")],
)
def test_a_planted_loss_is_past_its_budget(plant, key, monkeypatch):
    plant(monkeypatch)
    result = run(*TEXT, "--only", key, "--budgets", str(BUDGETS))
    assert result.exit_code == 1
    assert f"past budget: {key}: logits: logits_mean" in result.output


def test_faults_of_a_budgets_file_are_reported_together(tmp_path):
    path = tmp_path / "b.toml"
    path.write_text('[speed]\nreason = "x"\n[xla]\nspeed = 1\n[drafts]\nreason = "x"\ntokens_differing = 0.5\n')
    with pytest.raises(BudgetError) as error:
        read_ledger_budgets(path)
    faults = "\n".join(error.value.faults)
    assert len(error.value.faults) == 4
    for part in ("no row 'speed'", "[xla] has no reason", "[end] speed is not one of", "tokens_differing is 0.5"):
        assert part in faults


def test_limits_of_what_a_row_does_not_measure_are_refused(tmp_path):
    path = tmp_path / "b.toml"
    path.write_text('[xla]\nreason = "x"\ntokens_differing = 0\n[drafts]\nreason = "x"\nkl_mean = 1.0\ntop1 = 1.0\n')
    with pytest.raises(BudgetError) as error:
        read_ledger_budgets(path)
    xla, drafts = error.value.faults
    assert "[xla] tokens_differing cannot be judged: the row measures logits" in xla
    assert "[drafts] kl_mean, top1 cannot be judged: the row measures tokens" in drafts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", "xla,speed"), "--only: no row speed; known are bf16_activations"),
        (("--only", "xla", "--page", "x.md"), "--page holds every row of the ledger: give it without --only"),
    ],
)
def test_what_is_wrong_is_said(arguments, message):
    with pytest.raises(ValueError, match=message):
        run("--lengths", "8", *arguments)


def test_a_page_keeps_what_is_outside_its_markers():
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = with_table(page, "| new |")
    assert once == f"before\n{BEGIN}\n\n| new |\n\n{END}\nafter\n" == with_table(once, "| new |")
    with pytest.raises(ValueError, match="the page has no <!-- ledger: begin -->"):
        with_table(f"{END}{BEGIN}", "")
