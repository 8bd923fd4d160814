"""Runs of layers, leaves that read slices of themselves, and loading without copies."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints.load import Checkpoint
from checkpoints.safetensors_file import ARRAY_DTYPES
from checkpoints.schema import tensor_schema
from pallas_kernels.grouped_experts.arrangement import arranged
from tests.helpers import golden
from tests.helpers.models import model
from v41jax.config import LayerMode
from v41jax.parameters import (
    Leaf,
    abstract_parameters,
    aligned_empty,
    describe_checkpoint,
    layer_weights,
    load_parameters,
    parameter_leaves,
    plan_runs,
    stack,
)
from v41jax.presets import preset
from v41jax.quantization_numpy import dequantize_dense, dequantize_expert


def test_released_reuse_layers_form_one_run_each():
    config = preset("v4.1-flash")
    runs = plan_runs(config)
    assert [layer for run in runs for layer in run.layers] == list(range(40))
    assert [len(run.layers) for run in runs] == [1, 1, 1, 5, 1, 5, 1, 5, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3]
    for run in runs:
        owners = {(config.layers[layer].kv_owner, config.layers[layer].topk_owner) for layer in run.layers}
        assert len(owners) == 1
        assert len(run.layers) == 1 or config.layers[run.layers[0]].mode in (LayerMode.REUSE, LayerMode.WINDOW)


def test_an_engram_layer_is_a_run_of_its_own():
    runs = plan_runs(preset("odd"))
    assert [run.layers for run in runs if run.topology.engram is not None] == [(0,), (6,)]


def counted(values: np.ndarray, reads: list[int], name: int) -> Leaf:
    def fill(checkpoint, index, out):
        reads.append(name)
        out[...] = values[index]

    return Leaf(values.shape, values.dtype, fill)


def test_a_slice_of_a_stack_reads_only_its_own_parts():
    reads: list[int] = []
    values = np.arange(24).reshape(4, 3, 2)
    leaf = stack(counted(values[index], reads, index) for index in range(4))
    assert np.array_equal(leaf.read(None, (slice(1, 3), slice(0, 2), slice(None))), values[1:3, :2])
    assert reads == [1, 2]


def test_shards_of_a_leaf_are_its_slices():
    config = golden.directory("pico")
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    with Checkpoint.open(config) as checkpoint:
        whole = load_parameters(checkpoint, max_model_len=32)
        shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), whole)
        sharded = load_parameters(checkpoint, max_model_len=32, shardings=shardings)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(sharded)):
        assert np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_leaves_read_into_memory_that_jax_adopts():
    leaf = aligned_empty((1000, 7), np.dtype(np.float32))
    leaf[...] = 1
    assert leaf.ctypes.data % 64 == 0
    assert jax.device_put(leaf).unsafe_buffer_pointer() == leaf.ctypes.data


@pytest.mark.parametrize("form", ["stored", "arranged", "dequantized"])
def test_the_schema_alone_describes_what_a_load_gives(form):
    config = preset("pico")
    schema = tensor_schema(config, scopes=("text",))

    def describe(name):
        return schema[name].shape, np.dtype(ARRAY_DTYPES[schema[name].dtype])

    leaves = parameter_leaves(config, describe, max_model_len=512, form=form, dtype=np.float32)
    loaded = model("pico", form=form).params
    for a, b in zip(jax.tree.leaves(abstract_parameters(leaves)), jax.tree.leaves(loaded), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_widened_weights_are_codes_times_scales():
    loaded = model("pico")
    weights = layer_weights(loaded.params, loaded.setup.config, 3)
    tensor = loaded.checkpoint.tensor
    name = "layers.3.attn.wq_b"
    wanted = dequantize_dense(tensor(f"{name}.weight"), tensor(f"{name}.scale"))
    assert np.array_equal(weights.attention.wq_b.values, wanted)
    name = "layers.3.ffn.experts.5.w2"
    wanted = dequantize_expert(tensor(f"{name}.weight"), tensor(f"{name}.scale"))
    assert np.array_equal(weights.moe.experts.w2.values[weights.moe.layer, 5], wanted)
    assert weights.compressor is None and weights.indexer is None and weights.engram is None


def test_arranged_weights_are_the_stored_ones_with_experts_of_whole_blocks_rearranged():
    stored, moved = (model("pico", form=form).params for form in ("stored", "arranged"))
    for run, moved_run in zip(stored.runs, moved.runs, strict=True):
        experts, moved_experts = run.moe.experts, moved_run.moe.experts
        assert moved_experts.w1.values.dtype == moved_experts.w3.values.dtype == np.uint16
        assert moved_experts.w2.values.dtype == np.uint8, "64 inner dims are no whole block"
        for name in ("w1", "w3"):
            expected = arranged(getattr(experts, name).values)
            assert np.array_equal(getattr(moved_experts, name).values, expected)
        plain = experts._replace(w1=moved_experts.w1, w3=moved_experts.w3)
        run = run._replace(moe=run.moe._replace(experts=plain))
        for a, b in zip(jax.tree.leaves(run), jax.tree.leaves(moved_run), strict=True):
            assert np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


def test_arranged_weights_are_refused_on_a_mesh():
    mesh = Mesh(np.array(jax.devices()[:1]), ("model",))
    with Checkpoint.open(golden.directory("pico")) as checkpoint:
        leaves = parameter_leaves(
            checkpoint.config, describe_checkpoint(checkpoint), max_model_len=32, form="arranged", dtype=np.float32
        )
        shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec()), leaves)
        with pytest.raises(ValueError, match='load "stored" ones onto a mesh'):
            load_parameters(checkpoint, max_model_len=32, form="arranged", shardings=shardings)


def test_a_layer_that_does_not_exist_is_refused():
    loaded = model("pico")
    with pytest.raises(ValueError, match=r"layer 12 is outside 0\.\.11"):
        layer_weights(loaded.params, loaded.setup.config, 12)
