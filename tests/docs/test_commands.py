"""Every command in the README and in docs/ is executed, on a tiny checkpoint and with smaller numbers.

A command is a line of a fenced `console` block that begins with `$ `. Fences without a language hold no commands. Names
of things that a reader has (`DIR`, a host) are replaced, what stands in square brackets is left out, and options that
say the same with a smaller number are appended: the last one wins. Commands that another test runs are listed with it,
and what cannot run here with the reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from checkpoints.synthesize import synthesize
from tests.docs import brief
from tests.helpers import golden, servers
from tests.helpers.redis_server import RedisServer
from tests.helpers.scripted_engine import ScriptedEngine
from v41jax.cli import app
from v41jax.config import ModelConfig
from v41jax.server import running

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

LEDGER = "tests/comparison/test_ledger.py::test_every_approximation_is_within_its_budget_and_none_is_free"
DYNAMIC = "tests/dspark/test_dynamic.py::test_the_measured_profile_serves_and_changes_no_token"
PROCESSES = "v41jax serve --model DIR --mesh data=1,model=8 --coordinator HOST:PORT --num-processes 2 --process-id"
IN_CLUSTER = "v41jax serve --model DIR --mesh data=1,model=8 --coordinator auto"
ELSEWHERE = {
    f"mpirun -n 2 {IN_CLUSTER}": ("tests/mesh/test_shards.py::test_two_processes_share_one_replica_and_notice_a_loss"),
    "v41jax compare --model DIR --replay --prompts FILE.jsonl --out report.json": (
        "tests/test_replay_distance.py::test_the_command_prints_a_table_and_writes_json"
    ),
    "v41jax compare --model checkpoints/nano --ledger --prompts docs/ledger/prompts.jsonl --continuation 64 "
    "--budgets docs/ledger/budgets.toml --page docs/numerics.md": LEDGER,
    "v41jax generate --model DIR --prompt TEXT --speculative-method dspark --num-speculative-tokens 5": DYNAMIC,
    "v41jax calibrate --model DIR --out profile.json --prompts typical.jsonl "
    "[the options of serve, with speculation]": DYNAMIC,
    "v41jax serve --model DIR [the same options] --dynamic-verify-lengths --calibration-profile profile.json": DYNAMIC,
    "python -m benchmarks.soak --url http://HOST:8000 --clients 64 --seconds 120 [--greedy]": (
        "tests/server/test_soak.py::test_nothing_is_lost_mixed_or_left_after_many_clients"
    ),
    "v41jax serve --model DIR --mesh data=4,model=2 --enable-expert-parallel": (
        "tests/mesh/test_shards.py::test_every_request_gets_what_one_device_gives_it"
    ),
    "python -m v41jax.notebook_pages": "tests/docs/test_notebooks.py::test_a_notebook_runs_from_top_to_bottom",
    "python -m pytest -q tests/compile_gates/test_index_tpu.py": "tests/compile_gates/test_index_tpu.py",
    "python -m pytest -q tests/compile_gates/test_index_gpu.py": "tests/compile_gates/test_index_gpu.py",
}
"""Command -> the test that runs the same options."""

TRAINS = "needs a GPU for minutes and the fetched text; tests/training runs its parts"
CANNOT = {
    "make demo": "installs the project: .ci/run executes it from a bare clone",
    "make test": "is the run that this test is a part of",
    "python -m training.data --out .data --cache /tmp/packages": "fetches gigabytes of packages",
    "python -m benchmarks.nano_numerics --model checkpoints/nano --data .data --parts formats,replay,drafts,mlx": (
        "reads what the command above fetches, for half an hour"
    ),
    "python -m training --data .data --out .train --phase target,replay,draft,export --seconds 340,165,145,0": TRAINS,
    "python -m training --data .data --out .train --phase baseline,cooldown --seconds 250,165": TRAINS,
    "python -m benchmarks.golden_on_device": "measures an accelerator",
    f"{PROCESSES} 0": "needs another host",
    f"{PROCESSES} 1": "needs another host",
    "gcloud compute tpus tpu-vm ssh NAME --worker=all --command 'v41jax serve --model DIR --mesh data=8,model=8 "
    "--enable-expert-parallel --coordinator auto'": "needs a TPU pod slice",
    f"srun --nodes=2 --ntasks-per-node=1 {IN_CLUSTER}": "needs SLURM",
}
"""Command -> why nothing here can run it."""

_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\s*(\$ )?(v41jax |python -m |make )")


def commands() -> list[tuple[str, str]]:
    """(page, command) of every command in the docs, in order."""
    found = []
    for page in PAGES:
        for language, body in _FENCE.findall(page.read_text(encoding="utf-8")):
            if language == "console":
                lines = [line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ ")]
                found += [(page.relative_to(ROOT).as_posix(), line.split("  #")[0].strip()) for line in lines]
    return found


COMMANDS = commands()
EXECUTED = [(page, command) for page, command in COMMANDS if command not in ELSEWHERE | CANNOT]

ENGINE = ("--kv-cache-block-size", "32", "--max-num-batched-tokens", "128", "--vision", "off")
SERVED = (*ENGINE, "--kv-cache-block-size", "64", "--max-num-seqs", "2", "--max-model-len", "256", "--num-pages", "16")
LOADED = ("--prompt-words", "4", "--shared-words", "4", "--output-tokens", "2")
SMALLER = {
    "v41jax serve": (*SERVED, "--no-warm-up", "--port", "0"),
    "v41jax bench": (
        *("--batches", "2", "--contexts", "28", "--new-tokens", "3", "--repeats", "1", "--dtype", "float32", *ENGINE),
    ),
    "v41jax bench serve": (*LOADED, "--requests", "2", "--turns", "2", "--rate", "0", "--pause", "0"),
    "v41jax compare": ("--lengths", "12"),
    "v41jax plan": (
        *("--config", "CONFIG", "--kernels", "xla", "--kv-cache-block-size", "32", "--max-num-batched-tokens", "128"),
        *("--max-num-seqs", "8", "--max-model-len", "1024", "--context", "256", "--num-pages", "64"),
        *("--steps", "decode"),
    ),
}
"""First words of a command -> options that make it cheap; their words are replaced as those of the docs are."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where commands run.

    Attributes:
      directory: working directory.
      words: what a word of the docs stands for.
    """

    directory: Path
    words: dict[str, str]

    def of(self, command: str) -> list[str]:
        """The words to run."""
        words = shlex.split(re.sub(r"\s*\[[^\]]*\]", "", command))
        extra = max((start for start in SMALLER if command.startswith(start + " ")), key=len, default=None)
        serves = "SMALL" if "--mesh" in words else "NANO"
        model = {"compare": "SHALLOW", "bench": "SHALLOW", "serve": serves}.get(words[1], "DIR")
        words = [model if word == "DIR" else word for word in words]
        smaller = list(SMALLER[extra] if extra else ())
        if "--until" in words or "pallas" in words:
            smaller += ["--until", "1"]
        return [self.words.get(word, word) for word in (*words, *smaller)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with everything that the commands name, and a server that answers with prepared words."""
    path = tmp_path_factory.mktemp("commands")
    np.save(path / "ids.npy", np.arange(3, 30, dtype=np.int32))
    budgets = re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8"), re.DOTALL)
    (path / "budgets.toml").write_text(budgets[1])
    synthesize(path / "shallow", shallow_config(), seed=3, scopes=("text",))
    with servers.running(ScriptedEngine()) as scripted:
        yield Place(
            path,
            {
                "DIR": str(golden.directory("five-layer")),
                "SHALLOW": str(path / "shallow"),
                "CONFIG": str(path / "shallow" / "config.json"),
                "SMALL": str(servers.write_checkpoint(path / "small", ("text",))),
                "data=1,model=8": "data=1,model=2",
                "data=8,model=8": "data=2,model=2",
                "v5p:4x4x4": "v5e:2x2",
                "mi355x:8": "mi355x:4",
                "NANO": str(ROOT / "checkpoints" / "nano"),
                "checkpoints/nano": str(ROOT / "checkpoints" / "nano"),
                "/tmp/tiny": str(path / "tiny"),
                "tiny": "pico",
                "http://HOST:8000": scripted.url,
                "/var/cache/v41jax": str(path / "pages"),
            },
        )


def shallow_config() -> ModelConfig:
    """A window layer and an owner with the Engram: what compiles fastest and still has every kind of tensor."""
    root = json.loads((golden.directory("five-layer") / "config.json").read_text())
    root["text_config"] |= {
        "num_hidden_layers": 2,
        "compress_ratios": [0, 1],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1],
        "candidate_source_layer_id": 1,
        "engram_layer_ids": [1],
        "num_nextn_predict_layers": 0,
        "dspark_target_layer_ids": [],
    }
    return ModelConfig.from_dict(root)


@pytest.mark.parametrize(("page", "command"), EXECUTED, ids=[f"{page}: {command}" for page, command in EXECUTED])
def test_a_command_of_the_docs_runs(page, command, place, monkeypatch, tmp_path):
    monkeypatch.chdir(place.directory)
    monkeypatch.setattr(running, "make_server", brief.BriefServer)
    monkeypatch.setattr(brief, "listed", [])
    words = place.of(command)
    store = next((number for number, word in enumerate(words) if word.startswith("redis://")), None)
    if "mesh" in command:
        on_two_devices(words, place)
    elif store is not None:
        with RedisServer(tmp_path) as server:
            words[store] = server.url
            execute(words, monkeypatch)
    else:
        execute(words, monkeypatch)
    if words[1] == "serve" and "mesh" not in command:
        assert brief.listed == ["nano"]


def execute(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a command in this process."""
    if words[0] == "v41jax":
        result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return
    assert words[:2] == ["python", "-m"], f"{words}: begin with v41jax or python -m"
    monkeypatch.setattr(sys, "argv", words[2:])
    runpy.run_module(words[2], run_name="__main__", alter_sys=True)


def on_two_devices(words: Sequence[str], place: Place) -> None:
    """Runs a command in a process with two virtual devices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.docs.brief", *words[1:]]
    done = subprocess.run(command, env=environment, cwd=place.directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_docs_hold_commands_and_no_stale_exception():
    assert len(EXECUTED) >= 25 and len(CANNOT) == 11
    assert set(ELSEWHERE) | set(CANNOT) <= {command for _, command in COMMANDS}, "an exception that no page has"
    for test in ELSEWHERE.values():
        file, _, name = test.partition("::")
        assert (ROOT / file).exists() and f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_commands_are_in_console_fences(page):
    """Otherwise nothing would execute them."""
    for language, body in _FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "console":
            assert not any(_COMMAND.match(line) for line in body.splitlines()), (
                f"in a fence of {language or 'no'} language"
            )
    outside = _FENCE.sub("", page.read_text(encoding="utf-8"))
    indented = [line for line in outside.splitlines() if line.startswith("    ") and _COMMAND.match(line)]
    assert not indented, "an indented command"


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target
