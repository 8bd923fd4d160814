"""Every command in the README and in docs/ is executed, on a tiny checkpoint, or listed here with the reason why not.

A command is a line of a fenced `console` block that begins with `$ `. Fences without a language hold no commands.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.helpers import golden
from v41jax.cli import app

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

SERVES = "runs until it is stopped: tests/server start the same command's server and tests/commands its options"
COMPARES = "costs seconds each: tests/comparison/test_command.py and test_sides.py run the same options"
KERNELS = "needs a GPU: no test compares a whole model with Pallas kernels by this command"
MESH = "needs eight devices: tests/mesh serves on virtual ones"
ELSEWHERE = {
    "make demo": ".ci/run executes it from a bare clone",
    "make test": "is the run that this test is a part of",
    "v41jax serve --model DIR --port 8000": SERVES,
    "v41jax serve --model DIR --port 8000 [engine options]": SERVES,
    "v41jax serve --model DIR --no-decoder-swa-bounded-replay --prompt-logprobs": SERVES,
    "v41jax serve --model DIR --port 8000 --max-num-seqs 64 --max-num-batched-tokens 4096": SERVES,
    "v41jax serve --model DIR --mesh data=1,model=8 --enable-expert-parallel": MESH,
    "v41jax serve --model DIR --mesh data=1,model=8 --coordinator HOST:PORT --num-processes 2 --process-id 0": MESH,
    "v41jax serve --model DIR --mesh data=1,model=8 --coordinator HOST:PORT --num-processes 2 --process-id 1": MESH,
    "v41jax serve --model DIR --host-cache-bytes 64000000000 --disk-cache-dir /var/cache/v41jax "
    "--disk-cache-bytes 500000000000 --shared-cache-url redis://store:6379/0": SERVES,
    "v41jax bench --model DIR --batches 1,8 --contexts 512": "tests/commands/test_bench.py runs a smaller one",
    "v41jax bench --model DIR --batches 1,8,32 --contexts 512,8192 --new-tokens 64 [engine options]": (
        "tests/commands/test_bench.py runs a smaller one"
    ),
    "v41jax serve --model DIR --port 8000 --kernels xla": SERVES,
    "v41jax serve --model DIR --port 8000 --kernels auto": SERVES,
    "v41jax bench serve --url http://HOST:8000 --requests 200 --rate 4 --shared-words 1000 --prefixes 4": (
        "needs a server on the network: tests/server/test_load.py runs it against one of its own"
    ),
    "v41jax bench serve --url http://HOST:8000 --workload agent --requests 32 --turns 12 --shared-words 3000 "
    "--pause 2": ("needs a server on the network: tests/server/test_load.py runs it against one of its own"),
    "python -m benchmarks.soak --url http://HOST:8000 --clients 64 --seconds 120 [--greedy]": (
        "needs a server on the network: tests/server/test_soak.py runs it shorter against one of its own"
    ),
    "v41jax serve --model DIR --speculative-method dspark --num-speculative-tokens 5": SERVES,
    "v41jax generate --model DIR --prompt TEXT --speculative-method dspark --num-speculative-tokens 5": (
        "needs a checkpoint with a draft: tests/acceptance/test_speculation.py runs the same options"
    ),
    "v41jax calibrate --model DIR --out profile.json --prompts typical.jsonl "
    "[the options of serve, with speculation]": "needs a checkpoint with a draft",
    "v41jax serve --model DIR [the same options] --dynamic-verify-lengths --calibration-profile profile.json": SERVES,
    "python -m training.data --out .data --cache /tmp/packages": "fetches packages; tests/training runs its parts",
    "python -m benchmarks.nano_numerics --model checkpoints/nano --data .data --parts formats,replay,drafts,mlx": (
        "takes half an hour: tests/benchmarks runs its measures"
    ),
    "v41jax compare --model checkpoints/nano --ledger --prompts docs/ledger/prompts.jsonl --continuation 64 "
    "--budgets docs/ledger/budgets.toml --page docs/numerics.md": "tests/comparison/test_ledger.py runs it",
    "python -m v41jax.notebook_pages": "tests/docs/test_notebooks.py executes every notebook",
    "python -m pytest -q tests/compile_gates/test_index_tpu.py": "is a test",
    "python -m pytest -q tests/compile_gates/test_index_gpu.py": "is a test",
    "python -m benchmarks.golden_on_device": "needs an accelerator; tests/test_model_golden.py is the CPU's",
    "v41jax compare --model DIR --left npz:run.npz --right xla:packed --dtype float32": COMPARES,
    "v41jax compare --model DIR --left reference --right xla --dtype float32 "
    "--no-activation-quantization --lengths 48": COMPARES,
    "v41jax compare --model DIR --right xla --dtype float32 --lengths 48": COMPARES,
    "v41jax compare --model DIR --right xla --dtype float32 --lengths 48 --export run.npz": COMPARES,
    "v41jax compare --model DIR --right xla --dtype float32 --lengths 48 --until 4 "
    "--json report.json --html report.html": COMPARES,
    "v41jax compare --model DIR --right xla --dtype float32 --no-activation-quantization --lengths 48 "
    "--budgets budgets.toml": COMPARES,
    "v41jax compare --model DIR --replay --prompts FILE.jsonl --out report.json": "in tests/test_replay_distance.py",
    "v41jax compare --model DIR --left xla --right pallas --dtype bfloat16 --lengths 96": KERNELS,
    "v41jax compare --model DIR --left xla --right pallas --dtype bfloat16 --lengths 24 --until 1": KERNELS,
}
"""Command -> why it is not executed here."""

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
EXECUTED = [(page, command) for page, command in COMMANDS if command not in ELSEWHERE]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A working directory with everything that the commands name."""
    path = tmp_path_factory.mktemp("commands")
    np.save(path / "ids.npy", np.arange(3, 30, dtype=np.int32))
    return path


@pytest.mark.parametrize(("page", "command"), EXECUTED, ids=[f"{page}: {command}" for page, command in EXECUTED])
def test_a_command_of_the_docs_runs(page, command, place, monkeypatch):
    monkeypatch.chdir(place)
    made = place / "tiny"
    words = shlex.split(command)
    checkpoint = golden.directory("five-layer")
    replaced = {"DIR": checkpoint, "/tmp/tiny": made, "checkpoints/nano": ROOT / "checkpoints" / "nano", "tiny": "pico"}
    words = [str(replaced.get(word, word)) for word in words]
    if words[0] == "v41jax":
        result = CliRunner().invoke(app, words[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return
    assert words[:2] == ["python", "-m"], f"{command}: begin with v41jax or python -m"
    monkeypatch.setattr(sys, "argv", words[2:])
    runpy.run_module(words[2], run_name="__main__", alter_sys=True)


def test_the_docs_hold_commands_and_no_stale_exception():
    assert len(EXECUTED) >= 4
    assert set(ELSEWHERE) <= {command for _, command in COMMANDS}, "an exception for a command that no page has"


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
