"""The distance of replay modes to full prefill, on a model whose arithmetic noise is known."""

import dataclasses
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from checkpoints.load import Checkpoint
from tests.helpers.replay_model import PAGE, SHORT, WINDOW, write_checkpoint
from v41jax.cli import app
from v41jax.full_forward import load_model
from v41jax.precision import Precision
from v41jax.reference import ReferenceModel
from v41jax.reference.replay_oracle import ReplayOracle
from v41jax.replay_distance import (
    FULL,
    MODES,
    MODES_BY_SIDE,
    Distance,
    continuation_logits,
    measure_replay,
    reference_continuation_logits,
    replay_page,
)

# The first has a whole page just below its cut: rows that a hit recomputes are still in the windows of what follows.
LENGTHS = (75, 30)
UNQUANTIZED = Precision(np.float32, activation_quantization=False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("distance") / "model"
    write_checkpoint(path, **SHORT)
    return path


@pytest.fixture(scope="module")
def measured(directory):
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 240, length).astype(np.int32) for length in LENGTHS]
    with load_model(directory, UNQUANTIZED, max_model_len=100) as model:
        assert replay_page(model.setup.config) == model.setup.geometry.block_size == PAGE > WINDOW
        done = []
        distances = measure_replay(model, prompts, continuation=8, progress=lambda: done.append(1))
        assert len(done) == len(prompts)
        with pytest.raises(ValueError, match=r"prompt 1 has 101 tokens, must be 2\.\.100"):
            measure_replay(model, [prompts[0], np.zeros(101, np.int32)])
    return {distance.mode: distance for distance in distances}


def test_only_replay_moves_the_logits(measured):
    assert list(measured) == [mode.name for mode in MODES]
    exact = measured[FULL.name]
    assert (exact.logits_max, exact.kl_max, exact.top1) == (0, 0, 1)
    assert exact.nll == exact.nll_full > 0
    noise = measured["full in chunks"]
    assert noise.logits_max < 1e-5
    for name in ("decoder replay", "encoder replay", "both replays"):
        assert measured[name].logits_mean > 10 * max(noise.logits_max, 1e-6)
        assert measured[name].kl_max >= measured[name].kl_mean > 0
        assert 0 <= measured[name].top1 <= 1


@pytest.mark.parametrize("name", ["decoder", "encoder", "both"])
def test_the_oracle_alone_gives_the_logits_of_the_runtime(directory, measured, name):
    ids = np.random.default_rng(1).integers(3, 240, LENGTHS[0]).astype(np.int32)
    mode = MODES_BY_SIDE[name]
    with (
        Checkpoint.open(directory, scopes=("text",)) as checkpoint,
        ReferenceModel(checkpoint, activation_quantization=False) as reference,
    ):
        oracle = ReplayOracle(reference)
        expected = reference_continuation_logits(oracle, ids, mode, 8, 100)
        with pytest.raises(ValueError, match=r"prompt 0 has 75 tokens, must be 2\.\.74"):
            reference_continuation_logits(oracle, ids, mode, 8, 74)
        if mode.hit:
            with pytest.raises(ValueError, match=f"no whole page of {PAGE} tokens in the first 22 tokens"):
                reference_continuation_logits(oracle, ids[:30], mode, 8, 100)
    with load_model(directory, UNQUANTIZED, max_model_len=100) as model:
        given = continuation_logits(model, ids, mode, 8)
    assert given.shape == expected.shape == (8, expected.shape[1])
    assert np.linalg.norm(given - expected) < 1e-5 * np.linalg.norm(expected)
    full = reference_full(directory, ids)[-9:-1]
    assert np.linalg.norm(full - expected) > 1e-4 * np.linalg.norm(expected)


def reference_full(directory, ids):
    """Logits of every row, exact."""
    with (
        Checkpoint.open(directory, scopes=("text",)) as checkpoint,
        ReferenceModel(checkpoint, activation_quantization=False) as reference,
    ):
        return reference.forward(ids, record=False).logits


def test_a_prompt_without_a_whole_page_has_no_hit_to_measure(measured):
    rows = {name: (distance.prompts, distance.rows) for name, distance in measured.items()}
    assert rows["decoder replay"] == rows[FULL.name] == (2, 16)
    assert rows["encoder replay"] == rows["both replays"] == (1, 8)


def test_the_command_prints_a_table_and_writes_json(directory, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    ids = np.random.default_rng(1).integers(3, 240, 100).tolist()
    prompts.write_text(json.dumps({"tokens": ids}) + "\n")
    arguments = ["compare", "--model", str(directory), "--replay", "--prompts", str(prompts), "--out", str(out)]
    arguments += ["--continuation", "8", "--dtype", "float32", "--no-activation-quantization", "--oracle"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    report = json.loads(out.read_text())
    assert all(0 < entry["oracle_max"] < 1e-5 for entry in report["modes"])
    result = CliRunner().invoke(app, [*arguments, "--oracle-budget", "1e-9"], catch_exceptions=False)
    assert result.exit_code == 1 and "full in chunks: " in result.stderr
    assert report["prompt_lengths"] == [100]
    assert [set(entry) for entry in report["modes"]] == [{field.name for field in dataclasses.fields(Distance)}] * 5
    for mode in MODES:
        assert mode.name in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to compare: give --right, --replay, or --ledger"),
        (["--replay", "--lengths", "20,x"], "--lengths '20,x' must be whole numbers of at least 2"),
    ],
)
def test_the_command_says_what_is_wrong(directory, arguments, message):
    with pytest.raises(ValueError, match=message):
        CliRunner().invoke(app, ["compare", "--model", str(directory), *arguments], catch_exceptions=False)
