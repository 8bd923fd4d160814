"""The load tool against a running server."""

import asyncio
import json

from typer.testing import CliRunner

from v41jax.cli import app
from v41jax.load.client import LoadClient
from v41jax.load.report import make_report
from v41jax.load.workloads import Workload


def test_shared_prefixes_come_from_the_cache(server):
    arguments = [
        *("bench", "serve", "--url", server.url, "--requests", "5", "--concurrency", "1", "--json"),
        *("--prompt-words", "8", "--shared-words", "90", "--output-tokens", "3"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["requests"], report["failed"], report["output_tokens"]) == (5, 0, 15)
    assert 0.4 < report["cached_share"] < 1
    assert report["time_to_first_token_s"]["p50"] > 0 and report["time_per_output_token_s"]["max"] > 0


def test_an_agents_prompts_grow_and_mostly_come_from_the_cache(server):
    workload = Workload(kind="agent", requests=1, turns=2, prompt_words=6, output_tokens=4)
    samples, seconds = asyncio.run(LoadClient(server.url, workload).run())
    assert [sample.error for sample in samples] == [None] * 2
    report = make_report(samples, seconds)
    first, second = report["turns"]
    assert first["mean_prompt_tokens"] < second["mean_prompt_tokens"]
    assert second["cached_share"] > 0.8


def test_what_a_server_refuses_is_a_failed_sample_not_a_crash(server):
    workload = Workload(requests=2, prompt_words=3000, output_tokens=1)
    samples, seconds = asyncio.run(LoadClient(server.url, workload).run())
    report = make_report(samples, seconds)
    assert report["failed"] == 2 and "HTTP 400" in report["first_errors"][0]


def test_a_server_that_is_not_there_is_one_line():
    result = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:9", "--requests", "1"])
    assert isinstance(result.exception, ValueError) and "http://127.0.0.1:9" in str(result.exception)
