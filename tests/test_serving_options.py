"""Faults of an engine's options, whatever they are of, are named together and before anything else happens."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from scheduler.runtime_config import EngineConfig, RuntimeConfigError
from tests.helpers.golden import GOLDEN
from v41jax import serving_options
from v41jax.cli import app
from v41jax.engine import Engine
from v41jax.following import follow_checkpoint
from v41jax.host_options import SECRET_VARIABLE, HostsError
from v41jax.serving_options import check_serving, in_cluster

FAULTS = {
    "coordinator": "10.0.0.1",
    "num_processes": 9,
    "process_id": 9,
    "dtype": "float16",
    "max_num_seqs": 1,
    "mesh": {"data": 2, "model": 3},
}
WORDS = (
    "coordinator '10.0.0.1' must read HOST:PORT",
    "process_id 9 must lie in 0..8",
    "has fewer chips than num_processes 9",
    "dtype 'float16' is unknown",
    "max_num_seqs 1 is below the 2 data shards",
    "tensor parallel size 3 does not divide vocab_size",
)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in ("OMPI_MCA_orte_hnp_uri", "SLURM_JOB_ID", SECRET_VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def directory(tmp_path):
    """A model's configuration without any weight."""
    shutil.copy(GOLDEN / "five-layer" / "config.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize("begin", [Engine.from_checkpoint, follow_checkpoint, check_serving])
def test_faults_of_processes_runtime_and_mesh_come_together(directory, begin):

    with pytest.raises(RuntimeConfigError) as error:
        begin(directory, EngineConfig(**FAULTS))
    faults = error.value.faults
    assert len(set(faults)) == len(faults), "a fault that two checks find is named once"
    for words in WORDS:
        assert any(words in fault for fault in faults), words


def test_the_command_line_names_them_one_a_line(directory):
    flags = ["--coordinator", "10.0.0.1", "--num-processes", "9", "--process-id", "9", "--dtype", "float16"]
    result = CliRunner().invoke(app, ["serve", "--model", str(directory), "--mesh", "data=2,model=3", *flags])
    assert isinstance(result.exception, RuntimeConfigError)
    assert sum(any(words in fault for words in WORDS) for fault in result.exception.faults) == 5
    result = CliRunner().invoke(app, ["generate", "--model", str(directory), "--prompt", "a", "--num-processes", "-1"])
    assert "num_processes -1 must be at least 1" in str(result.exception)


def test_a_fault_of_the_draft_on_the_mesh_is_among_them(directory):
    root = json.loads((directory / "config.json").read_text())
    experts = root["text_config"]["n_routed_experts"]
    root["text_config"]["dspark_n_routed_experts"] = experts + 1
    (directory / "config.json").write_text(json.dumps(root))
    options = {"mesh": {"data": 2, "model": 1}, "enable_expert_parallel": True, "max_model_len": 1}
    drafts = {"speculative_method": "dspark", "num_speculative_tokens": 2}
    with pytest.raises(RuntimeConfigError) as error:
        check_serving(directory, EngineConfig(**options, **drafts))
    assert any("does not divide dspark_n_routed_experts" in fault for fault in error.value.faults)


@pytest.mark.parametrize("wrong", [{"dtype": "float16"}, {"vision": "on"}, {"mesh": {"data": 1, "model": 1}}])
def test_a_process_that_refuses_its_options_tells_the_others(directory, monkeypatch, wrong):
    told = []
    monkeypatch.setattr(serving_options, "refuse", lambda hosts, faults: told.append((hosts.process, *faults)))
    options = {"coordinator": "127.0.0.1:9", "num_processes": 2, "process_id": 1, "mesh": {"data": 1, "model": 2}}
    with pytest.raises(RuntimeConfigError) as error:
        follow_checkpoint(directory, EngineConfig(**options | wrong))
    assert told == [(1, *error.value.faults)]


def test_without_a_cluster_auto_is_refused_and_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(serving_options, "check_serving", lambda *_: None)
    with pytest.raises(HostsError, match=r"found no processes to join .* or give --coordinator HOST:PORT"):
        in_cluster(tmp_path, EngineConfig(coordinator="auto", mesh={"data": 1, "model": 2}))


def test_options_are_checked_before_a_cluster_is_joined(directory):
    with pytest.raises(RuntimeConfigError, match="dtype 'float16'"):
        in_cluster(directory, EngineConfig(coordinator="auto", dtype="float16"))
