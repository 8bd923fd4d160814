"""Grammars on a model of random weights: whatever it writes has the form that was asked for."""

import json
import re

import numpy as np
import pytest

from tests.helpers import servers
from tests.helpers.tokenizers import tokenizer
from v41jax.logit_edits import GeneratedTokens
from v41jax.protocol import ProtocolError, ToolChoice, normalize_tools, parse_reply
from v41jax.protocol.tokens import DSML, END_OF_SENTENCE
from v41jax.server.constraint import Grammars
from v41jax.server.grammars import ReplyGrammar, call_grammar, content_grammar, schema_grammar

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
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "wizard"}}}},
            "response_format",
        ),
    ],
)
def test_what_cannot_be_enforced_is_refused(http, change, param):
    body = {"messages": QUESTION, "max_tokens": 1} | change
    answer = http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"].split(".choice")[0]) == (400, param), answer.text


class Reader:
    """Follows a constraint over a text, as a sampler would."""

    def __init__(self, grammar, after=None):
        self.tokenizer = tokenizer()
        self.end = self.tokenizer.control_id(END_OF_SENTENCE)
        self.constraint = compiler().compile(grammar, after=after, kept_out=(self.end,))

    def allowed(self, ids):
        """Whether each id is allowed after those before it, and whether the reply may end after them."""
        words = np.zeros(4040, np.uint32)
        results = []
        for count in range(len(ids) + 1):
            words[:] = 0xFFFFFFFF
            newest = ids[count - 1] if count else None
            before = np.asarray(ids[: max(count - 1, 0)], np.int32)
            self.constraint.write_mask(GeneratedTokens(before, newest), words)
            token = ids[count] if count < len(ids) else self.end
            results.append(bool(words[token // 32] >> (token % 32) & 1))
        return results

    def accepts(self, text):
        return all(self.allowed(self.tokenizer.encode_with_control(text)))


_compilers = []


def compiler():
    if not _compilers:
        _compilers.append(Grammars(tokenizer(), 129280))
    return _compilers[0]


def test_content_and_calls_of_strict_and_plain_tools_follow_the_markup():
    plain = {"type": "function", "function": {"name": "ns::find", "parameters": {"type": "object"}}}
    tools = normalize_tools([PAINT, WAIT, plain])
    marker = tokenizer().control_id(DSML)
    grammar = call_grammar(tools, ToolChoice("auto"), marker, parallel=True)
    paint = '<｜DSML｜ invoke name="paint">\n{}</｜DSML｜ invoke>\n'

    def reply(*calls, before=""):
        return f"{before}<｜DSML｜ calls>\n{''.join(calls)}</｜DSML｜ calls>"

    def json_parameter(name, value):
        return f'<｜DSML｜ parameter name="{name}" string="false">{value}</｜DSML｜ parameter>\n'

    good = paint.format(json_parameter("color", '"red"') + json_parameter("count", "42"))
    wait = '<｜DSML｜ invoke name="wait">\n\n</｜DSML｜ invoke>\n'
    find = (
        '<｜DSML｜ invoke name="ns::find">\n<｜DSML｜ parameter name="q" string="true">'
        'a </b> "c"\n</｜DSML｜ parameter>\n' + json_parameter("k", "[1, 2]") + "</｜DSML｜ invoke>\n"
    )
    accepted = [
        "",
        "Just text < here.\n\n",
        reply(good),
        reply(good, wait, find),
        reply(wait, before="One moment.\n\n"),
    ]
    for text in accepted:
        assert Reader(grammar).accepts(text), text
    calls = parse_reply(reply(good, wait, find), False, tools).calls
    assert [call.name for call in calls] == ["paint", "wait", "ns::find"]
    assert is_painting(json.loads(calls[0].arguments))
    refused = [
        reply(paint.format(json_parameter("count", "42"))),
        reply(paint.format(json_parameter("color", '"red"') + json_parameter("count", "100"))),
        reply(good.replace('"paint"', '"pain"')),
        reply(),
        reply(wait) + "more",
    ]
    for text in refused:
        assert not Reader(grammar).accepts(text), text
    single = call_grammar(tools, ToolChoice("required"), marker, parallel=False)
    assert Reader(single).accepts(reply(wait)) and not Reader(single).accepts(reply(wait, wait))
    assert not Reader(single).accepts("Just text.")


def test_strings_of_a_strict_tool_are_raw_and_optional_ones_may_be_left_out():
    properties = {"path": {"type": "string"}, "mode": {"type": "string", "enum": ["r", "w"]}}
    tool = {"name": "open", "strict": True, "parameters": {"type": "object", "properties": properties}}
    tools = normalize_tools([{"type": "function", "function": tool}])
    grammar = call_grammar(tools, ToolChoice("required"), tokenizer().control_id(DSML), parallel=True)
    path = '<｜DSML｜ parameter name="path" string="true">a\n"b" </c></｜DSML｜ parameter>\n'
    mode = '<｜DSML｜ parameter name="mode" string="true">{}</｜DSML｜ parameter>\n'
    for body, good in (
        (path, True),
        (path + mode.format("w"), True),
        (mode.format("r"), True),
        ("\n", True),
        (mode.format("x"), False),
        (mode.format("r") + path, False),
        ("", False),
    ):
        text = f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="open">\n{body}</｜DSML｜ invoke>\n</｜DSML｜ calls>'
        assert Reader(grammar).accepts(text) is good, body


def test_reasoning_is_free_but_cannot_end_the_reply():
    close = tokenizer().control_id("</think>")
    reader = Reader(schema_grammar(SCHEMA), after=close)
    ids = tokenizer().encode_with_control('Hm, red.</think>{"color": "red", "count": 12}')
    assert all(reader.allowed(ids))
    assert reader.allowed(ids[:2]) == [True, True, False]


def test_a_preempted_request_is_followed_from_what_it_kept():
    reader = Reader(content_grammar("choice", ["abcd efgh", "abcd ijkl"]))
    first = tokenizer().encode_with_control("abcd efgh")
    assert all(reader.allowed(first))
    assert all(reader.allowed(tokenizer().encode_with_control("abcd ijkl")))
    assert not all(reader.allowed(tokenizer().encode_with_control("abcd mnop")))


def test_a_grammar_that_does_not_compile_names_its_field():
    with pytest.raises(ProtocolError, match="tools: cannot be enforced"):
        compiler().compile(ReplyGrammar("start: missing_rule", "tools"), after=None, kept_out=())
