"""`v41jax bench`: rates by batch and context as JSON lines, and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from tests.helpers.golden import directory
from v41jax.cli import app

MODEL = str(directory("five-layer"))
SMALL = ("--kv-cache-block-size", "32", "--max-num-batched-tokens", "128", "--dtype", "float32")


def test_rates_of_every_batch_and_context_are_json_lines():
    # Both contexts run the same programs.
    sizes = ("--batches", "2", "--contexts", "28,24", "--new-tokens", "3", "--repeats", "1", "--vision", "off")
    result = CliRunner().invoke(app, ["bench", "--model", MODEL, *sizes, *SMALL])
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(record["context"], record["batch"]) for record in records] == [(28, 2), (24, 2)]
    for record in records:
        first, each = record["time_to_first_token_s"], record["time_per_output_token_s"]
        assert record["prefill_tokens_per_s"] * first == pytest.approx(2 * record["context"], rel=1e-3)
        assert record["decode_tokens_per_s"] * each == pytest.approx(2, rel=1e-3)
        assert {"device", "jax", "commit", "dtype", "model"} <= set(record)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --model DIR"),
        (["--model", MODEL, "--batches", "1,0"], "--batches '1,0' must be positive"),
        (["--model", MODEL, "--contexts", "many"], "--contexts 'many' must be positive"),
        (["--model", MODEL, "--new-tokens", "1"], "--new-tokens"),
        (["--model", MODEL, "serve"], "not to `bench serve`"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments, message):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", *arguments])
    assert result.exit_code == 2 and message in result.output, result.output


def test_a_context_that_the_model_cannot_hold_is_one_error():
    result = CliRunner().invoke(app, ["bench", "--model", MODEL, "--contexts", "5000", *SMALL])
    assert isinstance(result.exception, ValueError) and "4096" in str(result.exception)
