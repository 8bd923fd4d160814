"""Grammars on a model of random weights: whatever it writes has the form that was asked for."""

import functools
import json
import re
from typing import Literal

import openai
import pydantic
import pytest

from tests.helpers import servers

QUESTION = [{"role": "user", "content": "Answer."}]
NO_THINKING = {"thinking": {"type": "disabled"}}
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
PAINT = {"type": "function", "function": {"name": "paint", "strict": True, "parameters": SCHEMA}}
WAIT = {"type": "function", "function": {"name": "wait", "strict": True, "parameters": {"type": "object"}}}

NESTED = functools.reduce(lambda inner, _: {"items": inner}, range(400), {})
OPEN = {"type": "function", "function": {"name": "open", "strict": True, "parameters": SCHEMA | {"required": 5}}}


def ask(client, **options):
    extra = {**NO_THINKING, **options.pop("extra_body", {})}
    options.setdefault("max_tokens", 80)
    return client.chat.completions.create(model=servers.MODEL, messages=QUESTION, extra_body=extra, **options)


def is_painting(value):
    return set(value) == {"color", "count"} and value["color"] in ("red", "green") and 10 <= value["count"] <= 99


def test_a_json_schema_holds_for_every_choice_and_temperature(client):
    wanted = {"type": "json_schema", "json_schema": {"name": "painting", "schema": SCHEMA}}
    for temperature in (0, 2):
        reply = ask(client, response_format=wanted, temperature=temperature, n=2, seed=3)
        for choice in reply.choices:
            assert choice.finish_reason == "stop"
            assert is_painting(json.loads(choice.message.content))


def test_a_required_call_of_a_strict_tool_has_arguments_of_its_schema(client):
    reply = ask(client, tools=[PAINT, WAIT], tool_choice="required", parallel_tool_calls=False, max_tokens=120)
    call = reply.choices[0].message.tool_calls[0]
    assert reply.choices[0].finish_reason == "tool_calls" and len(reply.choices[0].message.tool_calls) == 1
    assert call.function.name in ("paint", "wait")
    named = ask(client, tools=[PAINT, WAIT], tool_choice={"type": "function", "function": {"name": "paint"}}, seed=1)
    assert all(is_painting(json.loads(call.function.arguments)) for call in named.choices[0].message.tool_calls)


class Painting(pydantic.BaseModel):
    """Becomes a strict schema in OpenAI's client, with a reference to a definition."""

    class Frame(pydantic.BaseModel):
        material: Literal["oak", "brass"]

    color: Literal["red", "green"]
    is_dry: bool
    frame: Frame


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_clients_own_parsing_gives_objects(client, stream):
    def reply(**options):
        options |= {"model": servers.MODEL, "messages": QUESTION, "extra_body": NO_THINKING, "max_tokens": 160}
        if not stream:
            return client.chat.completions.parse(**options)
        with client.chat.completions.stream(**options) as events:
            return events.get_final_completion()

    content = reply(response_format=Painting, seed=8).choices[0].message
    assert isinstance(content.parsed, Painting) and content.parsed.frame.material in ("oak", "brass")
    tools = [openai.pydantic_function_tool(Painting)]
    calls = reply(tools=tools, tool_choice="required", parallel_tool_calls=False, seed=9).choices[0].message.tool_calls
    assert [type(call.function.parsed_arguments) for call in calls] == [Painting]


@pytest.mark.parametrize(
    ("outputs", "form"),
    [
        ({"regex": "[0-9]{3}/[a-c]{2}"}, r"\d{3}/[a-c]{2}"),
        ({"choice": ["yes", "no", 'say "maybe"']}, r'yes|no|say "maybe"'),
        ({"grammar": 'start: "<" /[a-z]{2,4}/ ">"'}, r"<[a-z]{2,4}>"),
        ({"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}, r"\[((true|false)(, )?)*\]"),
    ],
)
def test_every_form_holds_in_both_endpoints(client, outputs, form):
    body = {"structured_outputs": outputs}
    assert re.fullmatch(form, ask(client, extra_body=body).choices[0].message.content)
    made = client.completions.create(model=servers.MODEL, prompt="x", max_tokens=40, extra_body=body)
    assert re.fullmatch(form, made.choices[0].text)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"structured_outputs": {"regex": "["}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "\ud800"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"const": "\ud800"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": NESTED}}, "structured_outputs.json"),
        ({"tools": [OPEN], "tool_choice": "required"}, "tools"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wizard"}}}},
            "response_format",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused(http, change, param):
    body = {"messages": QUESTION, "max_tokens": 1} | change
    answer = http.post("/v1/chat/completions", content=json.dumps(body))
    assert (answer.status_code, answer.json()["error"]["param"].split(".choice")[0]) == (400, param), answer.text


def test_a_grammar_that_fails_on_the_way_is_an_error_and_no_reply(http):
    """Nine hundred optional properties compile, and are more than the library follows."""
    texts = {f"p{index}": {"type": "string"} for index in range(900)}
    schema = {"type": "object", "properties": texts, "additionalProperties": False}
    body = {"messages": QUESTION, "max_tokens": 40, "temperature": 0, **NO_THINKING}
    answer = http.post("/v1/chat/completions", json=body | {"structured_outputs": {"json": schema}})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "grammar_failed"), answer.text
