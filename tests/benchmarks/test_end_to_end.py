"""The whole-model benchmark runs a cell and counts what the step must read."""

import json

import numpy as np
import pytest

from benchmarks import end_to_end
from benchmarks.random_model import random_draft, random_parameters, random_pools
from pallas_kernels.arithmetic import decode_main_row, decode_window_row
from pallas_kernels.stored_rows import load_rows
from scheduler.pool_geometry import V41PoolGeometry
from tests.acceptance.model import SHALLOW, acceptance_config
from v41jax.presets import preset


@pytest.fixture
def shallow(monkeypatch):
    """Any preset is a model of three layers and its draft."""
    monkeypatch.setattr(end_to_end, "preset", lambda name: acceptance_config(**SHALLOW))


def test_a_decode_cell_has_times_and_a_bound(shallow, capsys):
    end_to_end.main(["--preset", "pico", "--batches", "2", "--contexts", "70", "--prompts", ""])
    compiled, cell = map(json.loads, capsys.readouterr().out.splitlines())
    assert compiled["programs"] == 1 == len(compiled["compile_each_s"])
    assert (cell["phase"], cell["batch"], cell["context"]) == ("decode", 2, 70)
    assert 0 < cell["bytes"] < cell["weight_bytes"] and cell["flops"] > 0
    assert cell["step_ms"] >= cell["host_ms"] > 0 and 0 < cell["fraction"] < 1
    assert cell["tokens_per_s"] > 0


def test_a_decode_cell_with_drafts_verifies_and_drafts(shallow, capsys):
    end_to_end.main(["--preset", "pico", "--batches", "2", "--contexts", "70", "--prompts", "", "--drafts", "2"])
    compiled, cell = map(json.loads, capsys.readouterr().out.splitlines())
    assert cell["drafts"] == 2 and cell["step_ms"] > 0
    assert compiled["programs"] == 2, "a draft call compiled at its first use would count as time of a step"


def test_random_weights_are_of_the_form_that_an_engine_would_load():
    config = preset("pico")
    for form, dtype in (("stored", np.uint8), ("arranged", np.uint16)):
        experts = random_parameters(config, max_model_len=32, form=form).runs[0].moe.experts
        assert experts.w1.values.dtype == dtype and experts.w1.values.nbytes == 16 * experts.w1.scales.nbytes
        draft = random_draft(config, form=form).stages.moe.experts
        assert draft.w1.values.dtype == dtype and len(np.unique(draft.w1.values)) > 200


@pytest.mark.parametrize("packed", [False, True])
def test_random_pools_hold_values_of_about_one(packed):
    geometry = V41PoolGeometry(
        layers=2, owners=((0, 1),), block_size=32, window_size=32, head_dim=64, index_dim=32, packed=packed,
        index_format="fp4",
    )  # fmt: skip
    pools = random_pools(geometry, 3, 2)
    if packed:
        values = [decode_main_row(pools.main[0]), decode_window_row(pools.window)]
    else:
        values = [load_rows(pools.main[0], (slice(None),)), load_rows(pools.window, (slice(None),))]
    for value in values:
        assert np.isfinite(np.asarray(value, np.float32)).all() and np.abs(np.asarray(value, np.float32)).max() < 10
