"""`v41jax logits --tokens`: its files, its flags and its errors; numbers are judged in `test_model_*`."""

from __future__ import annotations

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers import golden
from v41jax.cli import app

FLOAT32 = ("--dtype", "float32", "--no-activation-quantization")


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, golden.load_expected("five-layer").prompt(3))
    return path


def run(tmp_path, *arguments: object) -> np.ndarray:
    """The logits a successful call wrote."""
    out = tmp_path / "out.npz"
    command = ["logits", "--model", golden.directory("five-layer"), "--out", out, *arguments]
    result = CliRunner().invoke(app, [str(part) for part in command], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    with np.load(out) as file:
        assert file.files == ["logits"] and file["logits"].dtype == np.float32
        return file["logits"]


@pytest.mark.parametrize("implementation", ["jax", "reference"])
def test_both_implementations_give_the_recorded_logits_in_chunks(tmp_path, prompt, implementation):
    arguments = ("--tokens", prompt, "--chunks", "5,16", "--implementation", implementation)
    logits = run(tmp_path, *arguments, *FLOAT32)
    assert np.abs(logits - golden.load_expected("five-layer").logits("noquant", 3)).max() < 1e-3


def test_the_reference_rounds_and_quantizes_unless_told_otherwise(tmp_path, prompt):
    rounded = run(tmp_path, "--tokens", prompt, "--implementation", "reference")
    exact = run(tmp_path, "--tokens", prompt, "--implementation", "reference", *FLOAT32)
    assert np.abs(rounded - exact).max() > 1e-2


def fails(tmp_path, *arguments: object) -> str:
    """The message of a call that is refused."""
    command = ["logits", "--model", golden.directory("five-layer"), "--out", tmp_path / "out.npz", *arguments]
    with pytest.raises(ValueError) as error:
        CliRunner().invoke(app, [str(part) for part in command], catch_exceptions=False)
    assert not (tmp_path / "out.npz").exists()
    return str(error.value)


def test_prompts_that_cannot_run_are_refused(tmp_path, prompt):
    assert "--tokens" in fails(tmp_path)
    for bad, fault in (([600], "0..511"), ([-1], "0..511"), ([[1]], "[n]"), ([], "[n]"), ([0.5], "integer")):
        np.save(tmp_path / "bad.npy", np.array(bad))
        assert fault in fails(tmp_path, "--tokens", tmp_path / "bad.npy")


@pytest.mark.parametrize(("chunks", "fault"), [("3,x", "whole numbers"), ("0", "at least 1"), ("3,,", "whole")])
def test_chunks_that_make_no_sense_are_refused(tmp_path, prompt, chunks, fault):
    assert fault in fails(tmp_path, "--tokens", prompt, "--chunks", chunks)


@pytest.mark.parametrize("content", [b"", b"1 2 3\n", b"PK\x03\x04 not a zip", b"\x93NUMPY\x01\x00"])
def test_files_that_hold_no_arrays_are_named(tmp_path, content):
    (tmp_path / "bad").write_bytes(content)
    for option in ("--tokens", "--image"):
        assert f"{option} {tmp_path / 'bad'}: no file of NumPy arrays" in fails(tmp_path, option, tmp_path / "bad")


def test_an_array_is_no_image_file(tmp_path, prompt):
    assert "lacks the arrays ids, patches, grid, types" in fails(tmp_path, "--image", prompt)
