"""The command: tables, files, exit codes."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers import golden
from v41jax.cli import app

FIVE = str(golden.directory("five-layer"))
SHORT = ["--dtype", "float32", "--no-activation-quantization", "--lengths", "24"]


def run(*arguments):
    return CliRunner().invoke(app, ["compare", "--model", FIVE, *arguments], catch_exceptions=False)


def test_a_comparison_writes_every_file_and_stays_within_its_budget(tmp_path):
    files = {name: tmp_path / name for name in ("report.json", "report.html", "run.npz", "budgets.toml")}
    files["budgets.toml"].write_text("[end]\nkl_mean = 1e-6\n[departures]\ncount = 0\n")
    result = run(
        "--right", "reference", *SHORT,
        "--json", str(files["report.json"]), "--html", str(files["report.html"]),
        "--export", str(files["run.npz"]), "--budgets", str(files["budgets.toml"]),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "no layer departs; 0 rounding flips located" in result.output
    report = json.loads(files["report.json"].read_text())
    assert report["first_departure"] is None and report["end"]["top1"] == 1 and report["past_budget"] == []
    assert {item["operation"] for item in report["operations"]} >= {"embedding", "attended", "topk", "logits"}
    html = files["report.html"].read_text()
    assert (
        html.count("<svg") == 3
        and not re.search(r"(src|href)=", html)
        and "http" not in html.replace("http://www.w3.org/2000/svg", "")
    )
    with np.load(files["run.npz"]) as file:
        assert file["noquant.float32.streams"].shape[:2] == (5, 24)
    again = run("--left", f"npz:{files['run.npz']}", "--right", "reference", *SHORT)
    assert again.exit_code == 0 and "no layer departs" in again.output


def test_past_a_budget_the_exit_code_is_one(tmp_path):
    budgets = tmp_path / "b.toml"
    budgets.write_text("[operations.streams]\nrelative_l2 = 1e-30\n")
    other = "reference:dtype=bfloat16"
    result = run("--right", other, *SHORT, "--until", "1", "--budgets", str(budgets))
    assert result.exit_code == 1
    assert "past budget: layer 0 streams: relative_l2" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--right", "xla:fast"], "unknown option 'fast'; see `v41jax compare --help`"),
        (["--right", "reference", "--until", "6"], "--until 6 must be 1..5"),
        (["--right", "reference", "--mode", "loose"], "--mode loose must be one of forced, free"),
        (
            ["--right", "xla:replay=both", "--export", "x.npz"],
            "no --until, no bounded replay and no mesh",
        ),
    ],
)
def test_what_is_wrong_is_said(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        run(*arguments)
