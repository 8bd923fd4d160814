"""Sampling fields: limits, all faults together, and the names requests use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41jax.protocol import ProtocolError
from v41jax.sampling_params import SamplingParams

NAN, INF = float("nan"), float("inf")


def faults(make, *args, **fields) -> dict[str, str]:
    with pytest.raises(ProtocolError) as caught:
        make(*args, **fields)
    return dict(caught.value.faults)


def test_defaults_sample_freely_without_limits():
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.n) == (1.0, -1, 1.0, 0.0, 1)
    assert (params.seed, params.max_tokens, params.logprobs) == (None, None, None)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
    assert not params.is_greedy and not params.ignore_eos
    assert SamplingParams(temperature=0).is_greedy


ACCEPTED = {
    "temperature": [0, 2, 0.7, 1],
    "top_k": [-1, 1, 10**9],
    "top_p": [1, 1e-9, 0.5],
    "min_p": [0, 1, 0.05],
    "presence_penalty": [-2, 2, 0.5],
    "frequency_penalty": [-2, 2, 0],
    "seed": [None, 0, -(2**63), 2**63 - 1],
    "max_tokens": [None, 1, 10**9],
    "n": [1, 128],
    "logprobs": [None, 0, 20],
    "ignore_eos": [True, False],
    "stop": ["a", [], ["a", "b"], ("a",), "x" * 1024, ["a"] * 16],
    "stop_token_ids": [[], [0, 5], (7,)],
    "logit_bias": [{}, {"5": 100}, {5: -100}, {"0": 0.5, 1: 1}],
}
REFUSED = {
    "temperature": [-0.1, 2.1, NAN, INF, "1", True, None, 10**400, [1]],
    "top_k": [0, -2, 1.0, True, None, "1"],
    "top_p": [0, -0.5, 1.1, NAN, None],
    "min_p": [-0.1, 1.1, NAN],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, -INF],
    "seed": [2**63, -(2**63) - 1, 1.5, True, "1", 10**5000],
    "max_tokens": [0, -1, 1.0, True],
    "n": [0, 129, 1.0, None],
    "logprobs": [-1, 21, True],
    "ignore_eos": [1, None, "yes"],
    "stop": ["", 5, None, {"a": 1}, ["a"] * 17, "x" * 1025, "\ud800"],
    "stop_token_ids": [5, "5", None, [1] * 257],
    "logit_bias": [[], None, {"a": 1}, {"-1": 1}, {1.5: 1}, {True: 1}, {"²": 1}, {str(k): 1 for k in range(1025)}],
}


@pytest.mark.parametrize("field", ACCEPTED)
def test_values_inside_the_limits_are_taken(field: str):
    for value in ACCEPTED[field]:
        assert type(getattr(SamplingParams(**{field: value}), field)) in (float, int, tuple, dict, bool, type(None))


@pytest.mark.parametrize("field", REFUSED)
def test_values_outside_the_limits_are_refused_by_name(field: str):
    for value in REFUSED[field]:
        found = faults(SamplingParams, **{field: value})
        assert list(found) == [field]
        assert "must" in found[field] or "surrogate" in found[field]


def test_every_field_has_cases():
    fields = set(SamplingParams.__dataclass_fields__)
    assert set(ACCEPTED) == fields and set(REFUSED) == fields


def test_entries_are_named_by_their_place():
    assert list(faults(SamplingParams, stop=["a", "", 3, "\ud800"])) == ["stop[1]", "stop[2]", "stop[3]"]
    assert list(faults(SamplingParams, stop_token_ids=[1, -1, True, "2"])) == [
        f"stop_token_ids[{k}]" for k in (1, 2, 3)
    ]
    biases = {"5": 101, "6": NAN, "7": True, "8": None, "9": INF}
    assert list(faults(SamplingParams, logit_bias=biases)) == [f"logit_bias.{k}" for k in range(5, 10)]
    assert "given twice" in faults(SamplingParams, logit_bias={"5": 1, 5: 2})["logit_bias"]


def test_all_faults_are_reported_together_with_value_and_limit():
    found = faults(SamplingParams, temperature=3, top_p=0, n=0, seed="x", stop=[""])
    assert found == {
        "temperature": "must be from 0 to 2, got 3",
        "top_p": "must be above 0 and at most 1, got 0",
        "seed": "must be an integer, got 'x'",
        "stop[0]": "must have 1 to 1024 characters, got 0",
        "n": "must be from 1 to 128, got 0",
    }
    assert faults(SamplingParams, top_k=0) == {"top_k": "must be at least 1 or -1, got 0"}


def test_values_have_their_declared_types_and_are_the_params_own():
    stop, bias = ["a"], {"5": 1}
    params = SamplingParams(temperature=1, stop=stop, logit_bias=bias, stop_token_ids=[3])
    stop.append("b")
    bias["6"] = 1
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (3,), {5: 1.0})
    assert type(params.temperature) is float
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert params == SamplingParams(stop="a", logit_bias={5: 1.0}, stop_token_ids=(3,))
    assert hash(params) == hash(SamplingParams(stop="a", stop_token_ids=(3,)))


def test_chat_requests():
    assert SamplingParams.from_chat_request({}) == SamplingParams()
    body = {"model": "m", "messages": 1, "temperature": None, "logprobs": True, "top_logprobs": 5, "max_tokens": 9}
    assert SamplingParams.from_chat_request(body) == SamplingParams(logprobs=5, max_tokens=9)
    body = {"logprobs": True, "max_tokens": 9, "max_completion_tokens": 7, "stop": "x", "ignore_eos": True}
    expected = SamplingParams(logprobs=0, max_tokens=7, stop=["x"], ignore_eos=True)
    assert SamplingParams.from_chat_request(body) == expected
    for body in ({"logprobs": False}, {"logprobs": False, "top_logprobs": 0}, {"logprobs": None, "top_logprobs": None}):
        assert SamplingParams.from_chat_request(body).logprobs is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_faults_of_chat_requests_have_the_requests_names(body: dict, field: str):
    assert list(faults(SamplingParams.from_chat_request, body)) == [field]


def test_faults_of_a_request_come_together():
    body = {"logprobs": "yes", "temperature": 9, "max_completion_tokens": "many"}
    assert set(faults(SamplingParams.from_chat_request, body)) == {"logprobs", "temperature", "max_completion_tokens"}


def test_completion_requests():
    assert SamplingParams.from_completion_request({"prompt": "x"}) == SamplingParams(max_tokens=16)
    body = {"logprobs": 5, "max_tokens": 3, "seed": 1, "max_completion_tokens": 0}
    assert SamplingParams.from_completion_request(body) == SamplingParams(logprobs=5, max_tokens=3, seed=1)
    assert list(faults(SamplingParams.from_completion_request, {"logprobs": True})) == ["logprobs"]


def test_ids_are_checked_against_a_vocabulary():
    params = SamplingParams(logit_bias={"9": 1, "10": 1}, stop_token_ids=[3, 11])
    params.check_ids(12)
    found = faults(params.check_ids, 10)
    assert list(found) == ["logit_bias", "stop_token_ids"]
    assert found["stop_token_ids"] == "token id 11 is not below the vocabulary size 10"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([*ACCEPTED, "top_logprobs", "max_completion_tokens"]), values, max_size=6))
def test_whatever_is_sent_gives_params_or_faults(body: dict):
    for read in (SamplingParams.from_chat_request, SamplingParams.from_completion_request):
        try:
            params = read(body)
        except ProtocolError as error:
            assert all(fault.param and fault.message for fault in error.faults)
        else:
            assert params == SamplingParams(**{field: getattr(params, field) for field in ACCEPTED})
