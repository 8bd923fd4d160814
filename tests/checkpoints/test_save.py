"""The writer: byte for byte what a reader expects, aligned, sharded by size, and never half a checkpoint."""

import json

import numpy as np
import pytest
import safetensors

from checkpoints import save
from checkpoints.errors import CheckpointError
from checkpoints.index_file import INDEX_NAME, read_index
from checkpoints.load import Checkpoint
from checkpoints.safetensors_file import ITEM_SIZES, read_header
from checkpoints.save import plan_shards, shard_header, write_checkpoint
from checkpoints.schema import SCOPES, Role, TensorSpec, tensor_schema
from checkpoints.verify import verify
from tests.helpers.golden import GOLDEN
from v41jax.presets import preset


def zeros(name, spec):
    yield np.zeros(spec.nbytes, np.uint8)


def test_a_golden_checkpoint_survives_being_written_again(tmp_path):
    with Checkpoint.open(GOLDEN / "pico", SCOPES) as golden:
        schema = tensor_schema(golden.config)
        write_checkpoint(
            tmp_path, golden.config, schema, lambda name, spec: [golden.tensor(name)], shard_bytes=1_500_000
        )
        with Checkpoint.open(tmp_path, SCOPES) as copy:
            assert copy.config == golden.config and copy.names == golden.names
            for name in golden.names:
                assert copy.tensor(name).dtype == golden.tensor(name).dtype
                assert copy.tensor(name).tobytes() == golden.tensor(name).tobytes()
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    assert all(path.stat().st_size < 1_500_000 + 200_000 for path in shards)
    assert read_index(tmp_path).total_size == 5_808_976
    assert verify(tmp_path).faults == ()


def test_public_readers_see_the_same_tensors(tmp_path):
    schema = {
        "w": TensorSpec((4, 3), "F32", Role.PLAIN),
        "b": TensorSpec((5,), "BF16", Role.PLAIN),
        "i": TensorSpec((2, 2), "I8", Role.EXPERT_WEIGHT),
    }
    values = {
        "w": np.arange(12, dtype=np.float32),
        "b": np.arange(5, dtype=np.uint16),
        "i": np.arange(4, dtype=np.int8),
    }
    write_checkpoint(tmp_path, preset("pico"), schema, lambda name, spec: [values[name]])
    read = dict(safetensors.deserialize((tmp_path / "model-00001-of-00001.safetensors").read_bytes()))
    for name, spec in schema.items():
        assert (tuple(read[name]["shape"]), read[name]["dtype"]) == (spec.shape, spec.dtype)
        assert bytes(read[name]["data"]) == values[name].tobytes()


def test_every_tensor_is_aligned_to_its_elements(tmp_path):
    config = preset("odd")
    write_checkpoint(tmp_path, config, tensor_schema(config), zeros, shard_bytes=700_000)
    for path in tmp_path.glob("*.safetensors"):
        entries, _ = read_header(path)
        assert all(entry.begin % ITEM_SIZES[entry.dtype] == 0 for entry in entries.values())
    with Checkpoint.open(tmp_path) as checkpoint:
        assert all(checkpoint.tensor(name).flags.aligned for name in checkpoint.names)


def test_shards_are_cut_before_they_exceed_the_limit():
    schema = {str(i): TensorSpec((size,), "I8", Role.PLAIN) for i, size in enumerate([5, 5, 1, 20, 3, 0, 7])}
    assert plan_shards(schema, 10) == [["0", "1"], ["2"], ["3"], ["4", "5", "6"]]
    assert plan_shards(schema, 1000) == [list("0123456")]
    assert plan_shards({}, 10) == []
    with pytest.raises(ValueError, match="0 bytes holds nothing"):
        plan_shards(schema, 0)


def test_production_shards_and_headers():
    schema = tensor_schema(preset("v4.1-flash"))
    shards = plan_shards(schema, 11 * 2**30)
    assert sum(map(len, shards)) == 96_085
    sizes = [sum(schema[name].nbytes for name in shard) for shard in shards]
    assert sum(size > 11 * 2**30 for size in sizes) == 2  # the two tables
    header = json.loads(shard_header(shards[0], schema)[8:])
    assert len(header) == len(shards[0]) + 1


def test_a_wrong_number_of_bytes_is_a_defect_of_the_caller_and_leaves_no_checkpoint(tmp_path):
    config = preset("pico")
    with pytest.raises(ValueError, match=r"hc_attn_fn: contents gave 4 bytes, the schema states 49152"):
        write_checkpoint(tmp_path, config, tensor_schema(config), lambda name, spec: [np.zeros(1, np.float32)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


def test_an_interrupted_write_leaves_no_index(tmp_path):
    def interrupted(name, spec):
        if name.startswith("layers.3."):
            raise KeyboardInterrupt
        yield from zeros(name, spec)

    config = preset("pico")
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, config, tensor_schema(config), interrupted, shard_bytes=500_000)
    assert not (tmp_path / INDEX_NAME).exists() and not list(tmp_path.glob("*.partial"))
    with pytest.raises(CheckpointError, match=f"{INDEX_NAME}: cannot be read"):
        Checkpoint.open(tmp_path)


def test_a_directory_in_use_or_a_full_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    config = preset("pico")
    (tmp_path / "old.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"already holds old.safetensors; choose an empty directory"):
        write_checkpoint(tmp_path, config, tensor_schema(config), zeros)
    empty = tmp_path / "empty"
    monkeypatch.setattr(save.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(CheckpointError, match="needs 5808976 bytes, the disk has 1000 free"):
        write_checkpoint(empty, config, tensor_schema(config), zeros)
    assert list(empty.iterdir()) == []
    with pytest.raises(CheckpointError, match="cannot be created"):
        write_checkpoint(tmp_path / "old.safetensors" / "x", config, tensor_schema(config), zeros)


def test_progress_counts_every_byte(tmp_path):
    config, seen = preset("pico"), []
    write_checkpoint(tmp_path, config, tensor_schema(config), zeros, progress=seen.append)
    assert sum(seen) == 5_808_976
