"""The ragged exchange of expert rows on eight virtual devices: no row lost, every sum in one order, NaN kept apart."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.mesh.exchange import (
    CHOSEN,
    EXPERTS,
    HELD,
    INNER,
    MESHES,
    MOVED,
    PLACES,
    ROWS,
    WATCHED,
    WIDTH,
    cases,
    real_weights,
    scales,
)
from tests.mesh.processes import finish, start
from v41jax.hlo_collectives import Collective
from v41jax.layers.exchange_rule import decide
from v41jax.plan_work import sent_bytes


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    """Sums of all cases, from one process that has eight devices."""
    out = tmp_path_factory.mktemp("exchange") / "out.npz"
    finish(start("tests.mesh.exchange", out))
    with np.load(out) as file:
        return {name: file[name] for name in file.files}


def sums_in_order(case, parallel, order):
    """[data n, model, D]: each column's partial sums of a row, one for each shard, added in the order of the shards."""
    scale = scales()
    total = np.zeros((len(case.rows), parallel.model, case.rows.shape[1]), np.float32)
    rows = np.where(case.valid[:, None], case.rows, 0)
    for shard in order(range(parallel.data)):
        for column in range(parallel.model):
            partial = np.zeros_like(rows)
            for index in range(CHOSEN):
                here = case.experts[:, index] // HELD == shard * parallel.model + column
                term = rows * (case.factors[:, index] * scale[case.experts[:, index]])[:, None]
                partial += np.where(here[:, None], term, 0).astype(np.float32)
            total[:, column] += partial
    return total


@pytest.mark.parametrize("case", ["random", "crowded", "moved", "idle"])
@pytest.mark.parametrize("mesh", MESHES)
def test_sums_are_those_of_all_chosen_experts_added_in_order_of_the_shards(exchanged, mesh, case):
    parallel = MESHES[mesh]
    inputs = cases(parallel.data)[case]
    expected = sums_in_order(inputs, parallel, lambda shards: shards)
    assert np.array_equal(exchanged[f"{mesh}/{case}"], expected)
    assert (case == "idle") != bool(expected[inputs.valid].any())


@pytest.mark.parametrize("mesh", MESHES)
def test_another_order_would_round_otherwise(mesh):
    inputs = cases(MESHES[mesh].data)["random"]
    forward, backward = (sums_in_order(inputs, MESHES[mesh], order) for order in (lambda shards: shards, reversed))
    assert not np.array_equal(forward, backward)


@pytest.mark.parametrize("mesh", [*MESHES, "real"])
def test_a_row_gets_the_same_bits_whatever_else_is_in_the_batch(exchanged, mesh):
    assert np.array_equal(exchanged[f"{mesh}/moved"][MOVED], exchanged[f"{mesh}/random"][WATCHED])


@pytest.mark.parametrize("mesh", MESHES)
def test_one_round_sends_what_the_rule_counts(exchanged, mesh):
    shape = {"top_k": CHOSEN, "held": HELD, "width": WIDTH, "expert_width": INNER, "activation_bytes": 4}
    rule = decide(MESHES[mesh], ROWS, **shape, quantized=mesh.endswith("quantized"))
    counted = rule.ragged_bytes * PLACES / rule.places
    found = [Collective(**one) for one in json.loads(str(exchanged[f"{mesh}/collectives"]))]
    assert sent_bytes(found) == pytest.approx(counted, rel=0.02)


def test_a_crowd_at_one_chip_loses_nothing(exchanged):
    case, (w1, w3, w2) = cases(4)["crowded"], real_weights()
    assert (case.experts // HELD == EXPERTS // HELD - 1).all()
    expected = np.zeros(case.rows.shape)
    for index in range(CHOSEN):
        expert = case.experts[0, index]
        gate, up = (case.rows.astype(np.float64) @ matrix[expert].T for matrix in (w1, w3))
        with np.errstate(over="ignore"):
            hidden = case.factors[:, index, None] * gate / (1 + np.exp(-gate)) * up
        expected += hidden @ w2[expert].T
    found = exchanged["real/crowded"].sum(axis=1)
    largest = np.abs(expected).max(axis=1, keepdims=True)
    assert (largest > 0).all()
    assert np.max(np.abs(found - expected) / largest) < 1e-5
