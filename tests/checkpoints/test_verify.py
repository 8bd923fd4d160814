"""Verification reads the contents too, lists everything, and touches one piece of a tensor at a time."""

import os
import shutil

import numpy as np
import pytest

from checkpoints import verify as verify_module
from checkpoints.index_file import INDEX_NAME, read_index
from checkpoints.load import Checkpoint
from checkpoints.verify import verify
from tests.checkpoints.files import edit_json
from tests.helpers.golden import GOLDEN


@pytest.fixture
def directory(tmp_path):
    return shutil.copytree(GOLDEN / "pico", tmp_path / "pico")


def poke(directory, name, element, value):
    """Overwrites one stored element, given as an unsigned integer."""
    with Checkpoint.open(directory, ("text", "draft", "vision")) as checkpoint:
        path, entry = checkpoint.location(name)
        tensor = checkpoint.tensor(name)
    with open(path, "r+b") as stream:
        stream.seek(entry.begin + element * tensor.itemsize)
        stream.write(value.to_bytes(tensor.itemsize, "little"))
    return path.name


@pytest.mark.parametrize("name", ["pico", "five-layer"])
def test_golden_checkpoints_have_no_fault(name):
    result = verify(GOLDEN / name)
    assert (result.faults, result.shards) == ((), 2)
    index = read_index(GOLDEN / name)
    assert (result.tensors, result.nbytes) == (len(index.weight_map), index.total_size)


@pytest.mark.parametrize(
    "name, element, value, message",
    [
        ("layers.0.attn.wq_a.scale", 5, 255, "1 NaN scale codes (255), the first at [1, 1]"),
        ("layers.1.engram.embed.scale", 3000, 255, "1 NaN scale codes (255), the first at [3000, 0]"),
        ("layers.2.ffn.experts.7.w2.scale", 1, 255, "1 NaN scale codes (255), the first at [0, 1]"),
        ("mtp.1.attn.wkv.weight", 129, 0xFF, "1 values that are NaN or infinite, the first at [1, 1]"),
        ("layers.4.engram.embed.weight", 0, 0x7F, "1 values that are NaN or infinite, the first at [0, 0]"),
        ("embed.weight", 128, 0x7F80, "1 values that are NaN or infinite, the first at [1, 0]"),
        ("layers.3.attn.attn_sink", 2, 0xFFC00000, "1 values that are NaN or infinite, the first at [2]"),
        ("image_end", 127, 0xFFFF, "1 values that are NaN or infinite, the first at [127]"),
    ],
)
def test_impossible_values_are_found_in_every_kind_of_tensor(directory, name, element, value, message):
    shard = poke(directory, name, element, value)
    assert verify(directory).faults == (f"{shard}: {name}: {message}",)
    assert verify(directory, contents=False).faults == ()


def test_largest_finite_values_are_possible(directory):
    poke(directory, "embed.weight", 0, 0x7F7F)
    poke(directory, "layers.3.attn.attn_sink", 0, 0x7F7FFFFF)
    poke(directory, "mtp.1.attn.wkv.weight", 0, 0x7E)
    poke(directory, "layers.0.attn.wq_a.scale", 0, 254)
    poke(directory, "layers.0.ffn.experts.0.w1.weight", 0, 0xFF)
    assert verify(directory).faults == ()


def test_pieces_are_counted_as_one_fault_a_tensor(directory, monkeypatch):
    monkeypatch.setattr(verify_module, "PIECE", 64)
    for element in (3, 40, 70, 200):
        shard = poke(directory, "norm.weight" if element < 100 else "head.weight", element, 0x7FC0)
    seen = []
    result = verify(directory, progress=lambda done, total: seen.append((done, total)))
    assert result.faults == (
        f"{shard}: head.weight: 1 values that are NaN or infinite, the first at [1, 72]",
        f"{shard}: norm.weight: 3 values that are NaN or infinite, the first at [3]",
    )
    assert seen[-1] == (5_808_976, 5_808_976) and [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_stray_shard_and_a_bad_config_are_reported_with_the_rest(directory):
    shutil.copy(directory / "model-00001-of-00002.safetensors", directory / "old.safetensors")
    poke(directory, "norm.weight", 0, 0x7FC0)
    assert verify(directory).faults[0] == f"old.safetensors: not named by {INDEX_NAME}"
    edit_json(directory / "config.json", lambda config: config["text_config"].update(hc_mult="4", o_groups=3))
    edit_json(directory / INDEX_NAME, lambda index: index["weight_map"].pop("norm.weight"))
    assert verify(directory).faults == (
        "config.json: text_config.hc_mult is '4', must be a whole number",
        "config.json: text_config.num_attention_heads is 8, must be a multiple of o_groups 3",
        f"model-00001-of-00002.safetensors: norm.weight: not in {INDEX_NAME}",
        f"old.safetensors: not named by {INDEX_NAME}",
    )


def test_tensors_of_a_wrong_dtype_are_not_read_as_something_else(directory):
    with Checkpoint.open(directory) as checkpoint:
        path, _ = checkpoint.location("norm.weight")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"norm.weight": {"dtype": "BF16"', b'"norm.weight": {"dtype": "F16" ', 1))
    assert verify(directory).faults == (f"{path.name}: norm.weight: dtype F16, expected BF16 (plain)",)


def test_the_bit_tests_agree_with_floating_point():
    rng = np.random.default_rng(0)
    bits = np.concatenate([rng.integers(0, 2**32, 5000, np.uint32), np.uint32([0x7F800000, 0xFF800000, 0x7F7FFFFF, 0])])
    found = verify_module._impossible(bits.view(np.float32), "F32")
    np.testing.assert_array_equal(found, ~np.isfinite(bits.view(np.float32)))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the platform has no named pipes")
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("model-00001-of-00002.safetensors", "0 bytes are too few for a safetensors file"),
        (INDEX_NAME, "is empty"),
        ("config.json", "not a JSON file: it is empty"),
    ],
)
def test_a_pipe_in_place_of_a_file_is_a_fault_and_is_not_waited_for(directory, name, fault):
    (directory / name).unlink()
    os.mkfifo(directory / name)
    assert f"{name}: {fault}" in verify(directory).faults
