"""Bodies that nobody would send: every answer is an error in the API's form, and none is the server's fault."""

import json

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41jax.server.schemas import CHAT, COMPLETION, DETOKENIZE, TOKENIZE

NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=True, allow_infinity=True)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text(st.characters(codec=None), max_size=8)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | VALUES},
        optional={
            "content": st.text(max_size=20) | VALUES,
            "tool_calls": VALUES,
            "tool_call_id": VALUES,
            "reasoning_content": VALUES,
        },
    ),
    max_size=3,
)
SHORT = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1}
"""Keeps what turns out to be a request short."""

ROUTES = {
    "/v1/chat/completions": (CHAT, {"messages": MESSAGES}),
    "/v1/completions": (COMPLETION, {"prompt": st.text(max_size=10) | st.lists(st.integers(0, 9), max_size=3)}),
    "/tokenize": (TOKENIZE, {"messages": MESSAGES}),
    "/detokenize": (DETOKENIZE, {"tokens": st.lists(st.integers(-2, 200000), max_size=3)}),
}


@st.composite
def requests(draw):
    route = draw(st.sampled_from(sorted(ROUTES)))
    schema, sensible = ROUTES[route]
    body = {name: draw(strategy | VALUES) for name, strategy in sensible.items()}
    for name in draw(st.lists(st.sampled_from(sorted(schema["properties"])), unique=True, max_size=3)):
        if name not in body:
            body[name] = draw(VALUES)
    bounded = {name: value for name, value in SHORT.items() if not draw(st.booleans()) or name not in body}
    return route, body | bounded


@settings(max_examples=20, deadline=None)
@given(requests())
def test_no_body_is_the_servers_fault_with_a_model_behind_it(server, request):
    check(server, *request)


@settings(max_examples=300, deadline=None)
@given(requests())
def test_no_body_is_the_servers_fault(scripted, request):
    check(scripted, *request)


def check(server, route, body):
    with httpx.Client(base_url=server.url, timeout=600) as http:
        answer = http.post(route, content=json.dumps(body))
    assert answer.status_code < 500, answer.text
    if answer.status_code != 200 and "text/event-stream" not in answer.headers["content-type"]:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
        b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
    ],
)
@pytest.mark.parametrize("route", sorted(ROUTES))
def test_bytes_that_are_no_request_get_a_plain_refusal(scripted, route, content):
    with scripted.http() as http:
        answer = http.post(route, content=content)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")
