"""The sharded forward on eight virtual devices against one device: logits, tokens and what is sent."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.mesh.model import mesh_config
from tests.mesh.processes import finish, start
from tests.mesh.steps import DECODE_ROWS, ROWS, parse
from v41jax.hlo_collectives import Collective
from v41jax.layers.exchange_rule import exchange_of
from v41jax.plan_work import Rows, expected_collectives, sent_bytes

ONE = "1x1:intermediate"
MESHES = (
    "1x2:intermediate",
    "1x2:data_model",
    "1x4:model",
    "2x4:intermediate",
    "2x4:data_model",
    "4x2:intermediate",
    "1x8:intermediate",
    "1x8:data_model",
    "2x4:data_model:ragged",
    "4x2:data_model:ragged",
    "8x1:data_model:ragged",
)
EXCHANGING = tuple(mesh for mesh in MESHES if "data_model" in mesh)
QUANTIZED = ("1x1:intermediate:quantized", "2x2:data_model:quantized")


@pytest.fixture(scope="module")
def played(checkpoint, tmp_path_factory):
    """Arrays of all meshes, from one process that has eight devices."""
    out = tmp_path_factory.mktemp("played") / "out.npz"
    finish(start("tests.mesh.steps", checkpoint, out, ONE, *MESHES, *QUANTIZED))
    with np.load(out) as file:
        return {name: file[name] for name in file.files}


def collectives(played, mesh, phase="decode"):
    return [Collective(**entry) for entry in json.loads(str(played[f"{mesh}/{phase}"]))]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_gives_the_logits_and_tokens_of_one_device(played, mesh):
    expected, logits = played[f"{ONE}/logits"], played[f"{mesh}/logits"]
    assert np.abs(expected).max() > 0.1
    assert np.abs(logits - expected).max() < 1e-4
    assert np.array_equal(played[f"{mesh}/tokens"], played[f"{ONE}/tokens"])


@pytest.mark.parametrize("mesh", MESHES)
def test_a_decode_step_sends_what_its_layers_ask_for_and_nothing_else(played, mesh):
    parallel, _ = parse(mesh)
    rows = Rows(DECODE_ROWS, DECODE_ROWS, DECODE_ROWS, 0)
    expected = expected_collectives(mesh_config(), parallel, rows, activation_bytes=4, quantized=False)
    found = collectives(played, mesh)
    assert sent_bytes(found) == pytest.approx(sent_bytes(expected), rel=0.02)
    largest = DECODE_ROWS * parallel.data * mesh_config().text.hidden_size * 4
    assert max(one.bytes for one in found) <= largest, "no weight and no pool travels"


def test_one_device_sends_nothing(played):
    assert collectives(played, ONE) == []


@pytest.mark.parametrize("mesh", EXCHANGING)
def test_an_exchange_of_prefill_sends_what_the_rule_counts(played, mesh):
    config, (parallel, _) = mesh_config(), parse(mesh)
    exchange = exchange_of(config.text, parallel, ROWS, activation_bytes=4, quantized=False)
    found = collectives(played, mesh, "prefill")
    if exchange.ragged:
        assert exchange.places < ROWS
        own = [one for one in found if one.kind == "all-to-all" or one.bytes == 4]
        counted = exchange.ragged_bytes
    else:
        own = [one for one in found if one.group == parallel.data and one.kind != "all-reduce"]
        own = [one for one in own if one.count % len(config.layers) == 0]
        counted = exchange.gather_bytes
    assert sent_bytes(own) == pytest.approx(len(config.layers) * counted, rel=0.02)
    rows = Rows(ROWS, ROWS, ROWS, 0)
    expected = expected_collectives(config, parallel, rows, activation_bytes=4, quantized=False)
    assert sent_bytes(found) == pytest.approx(sent_bytes(expected), rel=0.02)


def test_quantized_rows_travel_as_codes(played):
    one, mesh = QUANTIZED
    assert np.median(np.abs(played[f"{mesh}/logits"] - played[f"{one}/logits"])) < 1e-3
    hidden, (parallel, _) = mesh_config().text.hidden_size, parse(mesh)
    gathered = [entry for entry in collectives(played, mesh, "prefill") if entry.kind == "all-gather"]
    assert any(entry.bytes == ROWS * parallel.data * hidden for entry in gathered)
