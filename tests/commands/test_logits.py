"""`v41jax logits --image`: the golden image prompt end to end, and files that do not hold what they must."""

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers.golden import directory, load_expected
from v41jax.cli import app

NAME = "five-layer"
EXACT = ("--dtype", "float32", "--no-activation-quantization")


def image_arrays(name):
    expected = load_expected(name)
    return {key: expected[key] for key in ("image.ids", "image.patches", "image.grid", "image.types")}


@pytest.fixture
def arrays():
    return image_arrays(NAME)


def run(tmp_path, arrays, *options, name=NAME):
    np.savez(tmp_path / "image.npz", **arrays)
    result = CliRunner().invoke(
        app,
        [
            *("logits", "--model", str(directory(name)), "--image", str(tmp_path / "image.npz")),
            *("--out", str(tmp_path / "out.npz"), *options),
        ],
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    with np.load(tmp_path / "out.npz") as file:
        return file["logits"]


def test_golden_image_logits(tmp_path, arrays):
    """By the activation that the golden checkpoints' configuration names; the released one is 5.6e-3 away from it."""
    golden = load_expected(NAME).recorded("noquant", "image_logits")
    assert np.abs(run(tmp_path, arrays, *EXACT) - golden).max() < 1e-4
    other = run(tmp_path, arrays, *EXACT, "--projector-hidden-act", "gelu")
    assert 1e-3 < np.abs(other - golden).max() < 1e-2


def test_golden_image_logits_of_every_layer_mode_by_the_reference(tmp_path):
    logits = run(tmp_path, image_arrays("pico"), *EXACT, "--implementation", "reference", name="pico")
    assert np.abs(logits - load_expected("pico").recorded("noquant", "image_logits")).max() < 1e-4


def test_the_reference_agrees_with_itself_in_any_chunks_inside_the_span(tmp_path, arrays):
    whole = run(tmp_path, arrays, *EXACT, "--implementation", "reference")
    parts = run(tmp_path, arrays, *EXACT, "--implementation", "reference", "--chunks", "9,1,63")
    assert whole.shape == (50, 512)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-6)
    assert np.abs(whole - load_expected(NAME).recorded("noquant", "image_logits")).max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("image.grid"), "lacks the arrays grid"),
        (lambda a: a.update({"image.grid": np.array([5, 7, 3, 3])}), "does not follow from its patches"),
        (lambda a: a.update({"image.types": a["image.types"][::-1]}), "types"),
        (lambda a: a.update({"image.ids": np.array([5, 500, 500, 6])}), "needs 10 consecutive image positions"),
        (lambda a: a.update({"image.ids": np.array([5, 512])}), "512"),
    ],
    ids=["missing", "grid", "types", "span", "id"],
)
def test_files_that_do_not_fit_are_named(tmp_path, arrays, change, message):
    change(arrays)
    with pytest.raises(ValueError, match=message):
        run(tmp_path, arrays)
