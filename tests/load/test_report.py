"""Percentiles, goodput and workloads of the load tool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from v41jax.load.client import Sample
from v41jax.load.report import make_report, percentile, spread
from v41jax.load.workloads import Agent, Workload


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.integers(1, 100))
def test_a_percentile_is_a_value_that_enough_others_do_not_exceed(values, rank):
    found = percentile(values, rank)
    assert found in values
    assert sum(value <= found for value in values) * 100 >= rank * len(values)
    assert sum(value < found for value in values) * 100 < rank * len(values)


def sample(first=0.5, whole=1.5, output=11, **fields):
    return Sample(0.0, first_s=first, whole_s=whole, output_tokens=output, prompt_tokens=100, **fields)


def test_a_report_counts_only_what_was_good_enough():
    samples = [
        sample(cached_tokens=50),
        sample(first=3.0, whole=4.0),
        sample(whole=50.0),
        sample(output=1),
        Sample(0.0, error="HTTP 429"),
    ]
    report = make_report(samples, 10.0, first_slo_s=1.0, per_token_slo_s=0.2)
    assert (report["requests"], report["failed"], report["good_share"]) == (5, 1, 2 / 5)
    assert (report["goodput_per_s"], report["requests_per_s"]) == (0.2, 0.4)
    assert report["cached_share"] == 50 / 400
    assert report["time_per_output_token_s"]["p50"] == pytest.approx(0.1)
    assert report["first_errors"] == ["HTTP 429"] and "turns" not in report
    assert make_report(samples, 10.0)["good_share"] == 4 / 5


def test_a_report_without_an_answer_has_no_percentiles():
    report = make_report([Sample(0.0, error="x")], 1.0)
    assert report["time_to_first_token_s"] == {} == spread([])
    assert report["cached_share"] == 0


def test_turns_are_reported_apart():
    report = make_report([sample(), sample(turn=1, cached_tokens=90)], 1.0)
    assert [turn["cached_share"] for turn in report["turns"]] == [0.0, 0.9]


def test_a_workload_repeats_itself_and_shares_prefixes():
    workload = Workload(requests=6, rate=5.0, prompt_words=4, shared_words=10, prefixes=2, seed=3)
    assert workload.arrivals() == Workload(**vars(workload)).arrivals() == sorted(workload.arrivals())
    assert len(set(map(workload.prompt, range(6)))) == 6
    assert workload.prompt(0).split()[:10] == workload.prompt(4).split()[:10] != workload.prompt(1).split()[:10]
    assert Workload(requests=3).arrivals() == [0, 0, 0]


def test_an_agent_answers_calls_and_goes_on_until_its_last_turn():
    agent = Agent(Workload(kind="agent", turns=3, prompt_words=3, shared_words=5), 0)
    calls = [{"id": "c1", "type": "function", "function": {"name": "run", "arguments": "{}"}}]
    assert agent.go_on({"role": "assistant", "content": "", "tool_calls": calls})
    assert agent.go_on({"role": "assistant", "content": "x"})
    assert not agent.go_on({"role": "assistant", "content": "y"})
    roles = [message["role"] for message in agent.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert agent.messages[3]["tool_call_id"] == "c1"


def test_sizes_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match=r"'swarm'.*requests 0.*rate -1"):
        Workload(kind="swarm", requests=0, rate=-1)
