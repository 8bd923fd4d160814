"""The table of axes: which weights and pools are cut, and which meshes are refused."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from checkpoints.safetensors_file import ARRAY_DTYPES
from checkpoints.schema import tensor_schema
from scheduler.model_view import ModelView
from scheduler.pools import abstract
from scheduler.runtime_config import EngineConfig
from tests.mesh.model import mesh_config
from v41jax.draft_parameters import draft_leaves
from v41jax.draft_runner import DraftingWeights
from v41jax.held_weights import abstract_held
from v41jax.layers.collectives import DATA, MODEL, Parallel
from v41jax.parameters import abstract_parameters
from v41jax.presets import preset
from v41jax.sharding import (
    WEIGHT_AXES,
    MeshError,
    arrangement,
    check_mesh,
    chip_bytes,
    make_mesh,
    mesh_faults,
    pool_specs,
    weight_specs,
)


@pytest.fixture(scope="module")
def released():
    return abstract_held(EngineConfig(), preset("v4.1-flash"), Parallel(), 1024, sees=False).target


def named(specs):
    flat, _ = jax.tree_util.tree_flatten_with_path(specs, is_leaf=lambda leaf: isinstance(leaf, P))
    return {".".join(str(entry.name) for entry in path if hasattr(entry, "name")): spec for path, spec in flat}


@pytest.fixture(scope="module")
def draft():
    config = preset("v4.1-flash")
    schema = tensor_schema(config, scopes=("text", "draft"))

    def describe(name):
        return schema[name].shape, np.dtype(ARRAY_DTYPES[schema[name].dtype])

    return abstract_parameters(draft_leaves(config, describe, form="stored", dtype=jnp.bfloat16))


def test_every_entry_of_the_table_names_a_weight(released, draft):
    names = {
        name.removeprefix("runs.").removesuffix(".values").removesuffix(".scales")
        for weights in (released, draft)
        for name in named(weight_specs(weights, Parallel(8, 8, "data_model")))
    }
    assert set(WEIGHT_AXES) <= names


def test_draft_stages_are_cut_like_layers(released, draft):
    parallel = Parallel(2, 8, "data_model")
    together = weight_specs(DraftingWeights(released, draft), parallel)
    assert together.target == weight_specs(released, parallel)
    assert together.draft == weight_specs(draft, parallel)
    specs = named(together.draft)
    layers = named(together.target)
    shared = [name for name in specs if name.startswith("stages.")]
    assert len(shared) > 20
    assert all(specs[name] == layers["runs." + name.removeprefix("stages.")] for name in shared)
    assert specs["stages.attention.wq_b.values"] == P(None, MODEL, None)
    assert specs["markov_head"] == P(MODEL, None)
    assert specs["main_proj.values"] == P()


def test_whole_experts_lie_over_both_axes_and_their_scales_with_them(released):
    specs = named(weight_specs(released, Parallel(8, 8, "data_model")))
    assert (
        specs["runs.moe.experts.w1.values"] == specs["runs.moe.experts.w1.scales"] == P(None, (DATA, MODEL), None, None)
    )
    assert specs["runs.attention.wq_b.values"] == P(None, MODEL, None)
    assert specs["runs.attention.wq_a.values"] == P(None)
    assert specs["head"] == P(MODEL, None)


def test_cut_experts_lie_along_their_intermediate_dimension(released):
    specs = named(weight_specs(released, Parallel(1, 8, "intermediate")))
    assert specs["runs.moe.experts.w1.values"] == P(None, None, MODEL, None)
    assert specs["runs.moe.experts.w2.scales"] == P(None, None, None, MODEL)


def test_every_part_of_a_released_weight_holds_whole_quantization_blocks(released):
    parallel = Parallel(8, 8, "data_model")
    checked = []

    def check(path, leaf, spec):
        assert all(size % (64 if axis == (DATA, MODEL) else 8) == 0 for size, axis in zip(leaf.shape, spec) if axis)
        checked.append(path)

    jax.tree_util.tree_map_with_path(check, released, weight_specs(released, parallel))
    assert len(checked) > 100


def test_bytes_of_a_chip_are_its_parts_and_the_replicas(released):
    whole = chip_bytes(released, weight_specs(released, Parallel()), Parallel())
    parallel = Parallel(8, 8, "data_model")
    part = chip_bytes(released, weight_specs(released, parallel), parallel)
    experts = 40 * 384 * 18_800_640
    assert whole > experts
    assert experts // 64 < part < experts // 64 + (whole - experts)
    assert chip_bytes(released, weight_specs(released, Parallel(8, 1)), Parallel(8, 1)) == whole


def test_pages_and_slots_belong_to_data_shards():
    geometry = EngineConfig().geometry(ModelView.from_config(preset("v4.1-flash")))
    pools = abstract(geometry, 16, 8)
    specs = pool_specs(pools, Parallel(8, 8))
    assert specs.main[0] == P(DATA)
    assert specs.window == P(None, DATA)
    assert specs.cursor == P(DATA)
    one = chip_bytes(pools, pool_specs(pools, Parallel()), Parallel())
    assert chip_bytes(pools, specs, Parallel(8, 8)) * 8 == one


def test_faults_of_a_mesh_are_named_together():
    faults = mesh_faults(preset("v4.1-flash"), Parallel(1, 16, "model"))
    assert faults == [
        "tensor parallel size 16 does not divide o_groups 8",
        "tensor parallel size 16 cuts moe_intermediate_size 2304 into parts of 144: that goes through a quantization "
        "block of 32",
    ]
    with pytest.raises(MeshError, match=r"expert parallel size 40 does not divide n_routed_experts 384"):
        check_mesh(preset("v4.1-flash"), Parallel(5, 8, "data_model"))
    with pytest.raises(MeshError, match="size 0: it must be at least 1"):
        check_mesh(preset("v4.1-flash"), Parallel(0, 8))


@pytest.mark.parametrize("model", [1, 2, 4, 8])
def test_the_released_model_is_cut_by_powers_of_two_up_to_its_groups(model):
    assert mesh_faults(preset("v4.1-flash"), Parallel(8, model, "data_model")) == []
    assert mesh_faults(preset("v4.1-flash"), Parallel(8, model, "intermediate")) == []


def test_whole_experts_lie_over_what_the_mesh_has():
    assert arrangement({"data": 1, "model": 4}, True) == Parallel(1, 4, "model")
    assert arrangement({"data": 2, "model": 4}, True) == Parallel(2, 4, "data_model")
    assert arrangement({"model": 4}, False) == Parallel(1, 4, "intermediate")


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(MeshError, match=f"data=64, model=8 needs 512 devices, there are {len(jax.devices())}"):
        make_mesh(Parallel(64, 8))


def test_a_mesh_without_devices_of_some_process_is_refused(monkeypatch):
    devices = [SimpleNamespace(process_index=number // 4) for number in range(8)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(MeshError, match="data=1, model=4 takes 4 of 8 devices and leaves none for process 1"):
        make_mesh(Parallel(1, 4))
    assert make_mesh(Parallel(1, 4), np.arange(8)).size == 4


def test_neighbours_on_model_are_neighbouring_devices():
    mesh = make_mesh(Parallel(2, 4), np.arange(8))
    assert mesh.devices.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_mesh_checkpoint_divides_by_eight():
    assert mesh_faults(mesh_config(), Parallel(1, 8, "intermediate")) == []
