"""The generated schema against the published totals and against checkpoints written by others."""

import collections
import json
from pathlib import Path

import pytest

from checkpoints.schema import SCOPES, Role, TensorSpec, group_of, scope_of, tensor_schema
from v41jax.config import ModelConfig
from v41jax.presets import PRESETS, preset

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def released():
    return tensor_schema(preset("v4.1-flash"))


def test_published_totals(released):
    assert len(released) == 96_085
    assert sum(spec.nbytes for spec in released.values()) == 510_286_023_000


def test_published_groups(released):
    tensors, sizes = collections.Counter(), collections.Counter()
    for name, spec in released.items():
        tensors[group_of(name, spec)] += 1
        sizes[group_of(name, spec)] += spec.nbytes
    assert {group: (tensors[group], sizes[group]) for group in tensors} == {
        "routed experts, backbone": (92_160, 288_777_830_400),
        "routed experts, draft": (2_304, 7_219_445_760),
        "Engram tables": (4, 202_758_032_400),
        "dense fp8": (710, 7_408_601_600),
        "everything else": (907, 4_122_112_840),
    }


def test_published_dtypes(released):
    assert collections.Counter(spec.dtype for spec in released.values()) == {
        "I8": 47_232,
        "F8_E4M3": 357,
        "F8_E8M0": 47_589,
        "BF16": 520,
        "F32": 387,
    }


def test_published_parameters(released):
    by_scope = collections.Counter()
    tables = 0
    for name, spec in released.items():
        by_scope[scope_of(name)] += spec.parameters
        tables += spec.parameters if spec.role is Role.TABLE_WEIGHT else 0
    assert round(sum(by_scope.values()) / 1e9, 1) == 763.2
    assert round((by_scope["text"] - tables) / 1e9, 1) == 551.9
    assert (round(tables / 1e9, 1), round(by_scope["draft"] / 1e9, 1)) == (196.6, 14.2)
    assert round(by_scope["vision"] / 1e9, 3) == 0.485


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("embed.weight", (129280, 5120), "BF16"),
        ("layers.39.hc_ffn_fn", (24, 20480), "F32"),
        ("layers.0.attn.attn_sink", (64,), "F32"),
        ("layers.0.attn.wq_b.weight", (32768, 1280), "F8_E4M3"),
        ("layers.0.attn.wq_b.scale", (1024, 40), "F8_E8M0"),
        ("layers.5.attn.wo_a.weight", (8192, 4096), "F8_E4M3"),
        ("layers.14.attn.compressor.wgate.weight", (512, 5120), "BF16"),
        ("layers.20.attn.indexer.wk.weight", (128, 512), "BF16"),
        ("layers.36.attn.indexer.wq_b.scale", (128, 40), "F8_E8M0"),
        ("layers.36.attn.indexer.weights_proj.weight", (32, 5120), "BF16"),
        ("layers.1.engram.embed.weight", (384006168, 256), "F8_E4M3"),
        ("layers.14.engram.embed.scale", (384016682, 8), "F8_E8M0"),
        ("layers.14.engram.wkv.scale", (800, 192), "F8_E8M0"),
        ("layers.1.engram.k_weight", (4, 5120), "BF16"),
        ("layers.39.ffn.experts.383.w2.weight", (5120, 1152), "I8"),
        ("layers.39.ffn.experts.383.w2.scale", (5120, 72), "F8_E8M0"),
        ("mtp.2.ffn.gate.bias_vl", (128,), "F32"),
        ("mtp.0.main_proj.scale", (160, 480), "F8_E8M0"),
        ("mtp.2.confidence_head.proj.weight", (1, 5376), "BF16"),
        ("vision.blocks.31.mlp.w1.weight", (5632, 1024), "BF16"),
        ("vision.patch_embed.proj.weight", (1024, 588), "BF16"),
        ("aligner.w1.weight", (5120, 9216), "BF16"),
        ("image_newline", (5120,), "BF16"),
    ],
)
def test_published_shapes(released, name, shape, dtype):
    assert (released[name].shape, released[name].dtype) == (shape, dtype)


@pytest.mark.parametrize(
    "name",
    [
        "layers.20.attn.compressor.wgate.weight",  # ratio 1 pools nothing
        "layers.24.attn.indexer.wk.weight",  # re-index layers read the owner's keys
        "layers.3.attn.indexer.wq_b.weight",
        "mtp.1.norm.weight",
        "mtp.1.main_proj.weight",
    ],
)
def test_what_a_layer_does_not_own(released, name):
    assert name not in released


def test_one_expert_has_its_published_bytes(released):
    prefix = "layers.7.ffn.experts.11."
    assert sum(spec.nbytes for name, spec in released.items() if name.startswith(prefix)) == 18_800_640


@pytest.mark.parametrize("name", ["pico", "five-layer"])
def test_golden_checkpoints_follow_the_schema(name):
    schema = tensor_schema(ModelConfig.from_file(GOLDEN / name))
    index = json.loads((GOLDEN / name / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(schema)
    assert sum(spec.nbytes for spec in schema.values()) == index["metadata"]["total_size"]


@pytest.mark.parametrize("name", PRESETS)
def test_scopes_partition_the_tensors(name):
    config = preset(name)
    parts = [tensor_schema(config, [scope]) for scope in SCOPES]
    whole = {key: spec for part in parts for key, spec in part.items()}
    assert whole == tensor_schema(config) and sum(map(len, parts)) == len(whole)
    for scope, part in zip(SCOPES, parts):
        assert {scope_of(key) for key in part} == {scope}


def test_dense_scales_round_up_and_count_no_parameters():
    odd = tensor_schema(preset("odd"))
    assert odd["layers.0.attn.wo_a.weight"].shape == (96, 288)
    assert odd["layers.0.engram.wkv.weight"].shape == (480, 384)
    assert odd["layers.0.hc_attn_fn"].shape == (8, 320)
    assert TensorSpec((3, 9), "F8_E8M0", Role.DENSE_SCALE).parameters == 0
    assert TensorSpec((3, 9), "I8", Role.EXPERT_WEIGHT).parameters == 54


def test_unknown_scope():
    with pytest.raises(ValueError, match="unknown scope 'audio'"):
        tensor_schema(preset("pico"), ["text", "audio"])
