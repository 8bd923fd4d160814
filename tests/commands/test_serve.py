"""`v41jax serve` as a process: it says where it listens, answers, and stops when told."""

import os
import re
import signal
import subprocess
import sys

import httpx
import pytest
from typer.testing import CliRunner

from tests.helpers import servers
from tests.helpers.golden import GOLDEN
from v41jax.cli import app

OPTIONS = ("--num-pages", "40", "--max-num-seqs", "4", "--max-model-len", "256", "--kv-cache-block-size", "32")
SMALL = (*OPTIONS, "--max-num-batched-tokens", "128", "--dtype", "float32", "--no-warm-up")


def test_a_server_process_answers_and_stops_on_a_signal(tmp_path):
    directory = servers.write_checkpoint(tmp_path / "served")
    command = [sys.executable, "-m", "v41jax", "serve", "--model", str(directory), "--port", "0", *SMALL]
    environment = {**os.environ, "V41JAX_API_KEY": "secret"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            url = None
            for line in process.stderr:
                found = re.search(r"serving served on (http://\S+)", line)
                if found:
                    url = found[1]
                    break
            with httpx.Client(base_url=url, timeout=30) as http:
                assert http.get("/health").json() == {"status": "ok"}
                assert http.get("/v1/models").status_code == 401
                listed = http.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()
                assert [model["id"] for model in listed["data"]] == ["served"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (0, -signal.SIGTERM)
        finally:
            process.kill()


def test_a_checkpoint_without_a_tokenizer_is_refused_in_one_line():
    result = CliRunner().invoke(app, ["serve", "--model", str(GOLDEN / "five-layer"), *SMALL])
    assert isinstance(result.exception, ValueError) and "tokenizer.json" in str(result.exception)


@pytest.mark.parametrize("arguments", [("--max-waiting", "-1"), ("--max-choices", "0")])
def test_options_are_checked_before_anything_is_loaded(arguments):
    result = CliRunner().invoke(app, ["serve", "--model", "missing", *arguments])
    assert isinstance(result.exception, ValueError) and arguments[1] in str(result.exception)
