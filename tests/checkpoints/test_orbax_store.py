"""Conversion to Orbax arrays: nothing lost, nothing doubled, resumable, checksummed."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from checkpoints.errors import CheckpointError
from checkpoints.load import Checkpoint
from checkpoints.orbax_store import MANIFEST, convert, coverage_faults, restore, stored_tensors, verify
from checkpoints.schema import tensor_schema
from tests.helpers import golden
from v41jax.commands.checkpoint import app
from v41jax.config import ModelConfig
from v41jax.parameters import describe_checkpoint, load_parameters, parameter_leaves
from v41jax.sharding import leaf_names

MAX_LEN = 32


@pytest.fixture(scope="module")
def source():
    return golden.directory("five-layer")


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("orbax") / "out"
    result = CliRunner().invoke(app, ["convert", str(source), "--to", "orbax", "--out", str(out)])
    assert result.exit_code == 0, result.output
    tensors = len(json.loads((out / MANIFEST).read_text())["tensors"])
    assert f"{out}: {tensors} tensors in " in result.stdout
    return out


def equal(a, b):
    return np.array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)) and a.dtype == b.dtype


def test_restored_weights_are_those_of_the_released_files(source, converted):
    with Checkpoint.open(source) as checkpoint:
        expected = load_parameters(checkpoint, max_model_len=MAX_LEN)
    restored = restore(converted, max_model_len=MAX_LEN)
    assert all(jax.tree.leaves(jax.tree.map(equal, restored, expected)))


def test_every_released_tensor_but_the_engram_tables_is_in_one_array(source, converted):
    config = ModelConfig.from_file(source / "config.json")
    manifest = json.loads((converted / MANIFEST).read_text())
    text = set(tensor_schema(config, scopes=("text",)))
    assert set(manifest["tensors"]) == stored_tensors(config)
    assert all(".engram.embed." in name for name in text - stored_tensors(config))
    assert sum(entry["tensors"] for entry in manifest["weights"].values()) == len(manifest["tensors"])


def test_a_lost_or_doubled_tensor_is_a_fault(source):
    with Checkpoint.open(source) as checkpoint:
        config = checkpoint.config
        tree = parameter_leaves(
            config, describe_checkpoint(checkpoint), max_model_len=1, form="stored", dtype=np.float32
        )
    names = jax.tree.leaves(leaf_names(tree))
    leaves = {name: leaf for name, leaf in zip(names, jax.tree.leaves(tree), strict=True) if leaf.names}
    assert coverage_faults(config, leaves) == []
    lost = {name: leaf for name, leaf in leaves.items() if name != "embed"}
    assert coverage_faults(config, lost) == ["embed.weight: in no weight, it would be lost"]
    assert coverage_faults(config, leaves | {"again": leaves["head"]}) == ["head.weight: in 2 weights"]


def test_an_interrupted_conversion_is_finished_and_keeps_what_it_has(source, converted, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    manifest = json.loads((out / MANIFEST).read_text())
    kept = (out / "embed").stat().st_mtime_ns
    del manifest["weights"]["head"]
    manifest["complete"] = False
    (out / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="interrupted: run it again"):
        restore(out, max_model_len=MAX_LEN)
    assert convert(source, out)["complete"]
    assert (out / "embed").stat().st_mtime_ns == kept
    assert verify(out) == []


def test_changed_bytes_are_found(converted, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(converted, out)
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["weights"]["norm"]["sha256"] = "0" * 64
    (out / MANIFEST).write_text(json.dumps(manifest))
    shutil.rmtree(out / "head")
    faults = verify(out)
    assert len(faults) == 2
    assert any("head: cannot be read" in fault for fault in faults)
    assert any("norm: its bytes are not those that were written" in fault for fault in faults)


def test_another_form_is_refused(source, tmp_path):
    result = CliRunner().invoke(app, ["convert", str(source), "--to", "zarr", "--out", str(tmp_path / "out")])
    assert (result.exit_code, result.stderr) == (2, "error: --to zarr is unknown: use orbax\n")


def test_the_conversion_of_another_checkpoint_is_left_alone(converted):
    with pytest.raises(CheckpointError, match="holds the conversion of another checkpoint"):
        convert(golden.directory("pico"), converted)
