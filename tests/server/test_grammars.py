"""Grammars without a server: what they accept, what they refuse, and what is too large for the library."""

import concurrent.futures
import json

import numpy as np
import pytest

from tests.helpers.tokenizers import tokenizer
from v41jax.logit_edits import GeneratedTokens
from v41jax.protocol import ProtocolError, ToolChoice, normalize_tools, parse_reply
from v41jax.protocol.tokens import DSML, END_OF_SENTENCE
from v41jax.server import constraint
from v41jax.server.constraint import Grammars
from v41jax.server.grammars import (
    ReplyGrammar,
    call_grammar,
    content_grammar,
    json_rule,
    read_structured_outputs,
    schema_grammar,
)

SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 10, "maximum": 99}},
    "required": ["color", "count"],
    "additionalProperties": False,
}
PAINT = {"type": "function", "function": {"name": "paint", "strict": True, "parameters": SCHEMA}}
WAIT = {"type": "function", "function": {"name": "wait", "strict": True, "parameters": {"type": "object"}}}


def is_painting(value):
    return set(value) == {"color", "count"} and value["color"] in ("red", "green") and 10 <= value["count"] <= 99


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


def test_rejected_proposals_are_taken_back():
    """As if they had never been seen, also when they ended the reply, and without reading it from its beginning."""
    reader = Reader(content_grammar("choice", ["abcd efgh", "abcd ijkl"]))
    whole, other = (tokenizer().encode_with_control(f"abcd {end}") for end in ("efgh", "ijkl"))
    start = next(index for index, (left, right) in enumerate(zip(whole, other)) if left != right)
    for drafted in ([*whole, reader.end], whole, other[:-1]):
        assert all(reader.allowed(drafted)[: len(drafted)])
        words = np.full(4040, 0xFFFFFFFF, np.uint32)
        reader.constraint.write_mask(GeneratedTokens(np.asarray(other[:start], np.int32), other[start]), words)
        token = other[start + 1] if start + 1 < len(other) else reader.end
        assert words[token // 32] >> (token % 32) & 1
        assert not words[whole[-1] // 32] >> (whole[-1] % 32) & 1
    assert all(reader.allowed(other))


def test_a_grammar_that_does_not_compile_names_its_field():
    with pytest.raises(ProtocolError, match="tools: cannot be enforced"):
        compiler().compile(ReplyGrammar("start: missing_rule", "tools"), after=None, kept_out=())


def strict_tool(properties, **rules):
    parameters = {"type": "object", "properties": properties, **rules}
    function = {"name": "open", "strict": True, "parameters": parameters}
    return normalize_tools([{"type": "function", "function": function}])


def required_call(properties, **rules):
    marker = tokenizer().control_id(DSML)
    return call_grammar(strict_tool(properties, **rules), ToolChoice("required"), marker, parallel=True)


def opened(parameters):
    markup = "".join(
        f'<｜DSML｜ parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜ parameter>\n"
        for name, value in parameters.items()
    )
    return f'<｜DSML｜ calls>\n<｜DSML｜ invoke name="open">\n{markup}</｜DSML｜ invoke>\n</｜DSML｜ calls>'


def test_references_of_a_strict_tool_lead_to_its_definitions_and_to_itself():
    node = {"type": "object", "properties": {"size": {"$ref": "#/properties/size"}}, "additionalProperties": False}
    node["properties"]["next"] = {"$ref": "#/$defs/node"}
    properties = {"size": {"type": "integer"}, "tree": {"$ref": "#/$defs/node"}, "again": {"$ref": "#"}}
    grammar = required_call(properties, additionalProperties=False, **{"$defs": {"node": node}})
    for tree, good in (
        ({"size": 1, "next": {"size": 2, "next": {}}}, True),
        ({"size": "1"}, False),
        ({"next": {"next": {"other": 1}}}, False),
    ):
        assert Reader(grammar).accepts(opened({"tree": tree})) is good, tree
    for again, good in (({"size": 1, "again": {"tree": {"size": 2}}}, True), ({"again": {"again": {"x": 1}}}, False)):
        assert Reader(grammar).accepts(opened({"again": again})) is good, again


@pytest.mark.parametrize(
    ("properties", "rules"),
    [
        ({"path": {"type": "string"}}, {"required": 5}),
        ({"path": {"type": "string"}}, {"required": "path"}),
        ({"path": {"type": "string"}}, {"required": [["path"]]}),
        ({"path": {"type": "string"}}, {"required": ["mode"]}),
        ({"path": {"type": "string", "enum": 5}}, {}),
        ({"path": {"type": "string", "enum": [5, None]}}, {}),
        ({'a "b"': {"type": "string"}}, {}),
    ],
)
def test_a_strict_tool_that_cannot_be_enforced_is_refused(properties, rules):
    with pytest.raises(ProtocolError, match="tools: "):
        required_call(properties, **rules)


def test_an_empty_text_may_be_one_of_the_values():
    grammar = required_call({"mode": {"type": "string", "enum": ["", "wide"]}}, required=["mode"])
    for value, good in (("", True), ("wide", True), ("w", False)):
        assert Reader(grammar).accepts(opened({"mode": value})) is good
    only = required_call({"mode": {"type": "string", "enum": [""]}})
    assert Reader(only).accepts(opened({"mode": ""})) and not Reader(only).accepts(opened({"mode": "x"}))


@pytest.mark.parametrize(
    ("regex", "accepted", "refused"),
    [
        (r"a/b\/c", "a/b/c", "a/b"),
        (r"[/]\\/", "/\\/", "/\\"),
        ("a\nb", "a\nb", "a"),
        ("a\\\nb", "a\nb", "anb"),
    ],
)
def test_a_regular_expression_may_hold_what_delimits_it(regex, accepted, refused):
    grammar = content_grammar("regex", regex)
    assert Reader(grammar).accepts(accepted) and not Reader(grammar).accepts(refused)


def chain(links, link):
    """A schema whose definitions refer to one another, each through `link`."""
    definitions = {f"d{index}": link({"$ref": f"#/$defs/d{index + 1}"}) for index in range(links)}
    return {"$ref": "#/$defs/d0", "$defs": definitions | {f"d{links}": {"type": "integer"}}}


HOSTILE = {
    "rules": "start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(20_000)) + 'r20000: "a"\n',
    "terminals": "start: T0\n" + "".join(f'T{index}: "x" T{index + 1}\n' for index in range(20_000)) + 'T20000: "a"\n',
    "alternatives": "start: " + " | ".join(f'"value{index}"' for index in range(20_000)),
    "references": f"start: {json_rule(chain(20_000, lambda inner: inner))}",
    "nested references": f"start: {json_rule(chain(3_000, lambda inner: {'items': inner}))}",
    "characters": f'start: "{"x" * 300_000}"',
    "many schemas": "start: " + "\n".join(f"r{index}: {json_rule({'enum': [{}] * 900})}" for index in range(10)),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_grammar_that_would_end_the_process_is_refused(kind):
    """Given to the library, the chains overflow the stack and the alternatives take a second a token."""
    with pytest.raises(ProtocolError, match=r"structured_outputs\.grammar: .*at most \d+ are accepted"):
        compiler().compile(ReplyGrammar(HOSTILE[kind], "structured_outputs.grammar"), after=None, kept_out=())


def test_the_largest_accepted_grammars_compile():
    """In a thread with the stack that workers have."""
    links = constraint.MAX_SCHEMA_OBJECTS // 2 - 5
    grammars = [
        schema_grammar(chain(links, lambda inner: {"anyOf": [inner]})),
        ReplyGrammar("start: r0\n" + "".join(f"r{index}: r{index + 1}\n" for index in range(1990)) + 'r1990: "a"', "x"),
    ]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for grammar in grammars:
            reader = pool.submit(Reader, grammar).result()
            assert pool.submit(reader.accepts, "7" if grammar is grammars[0] else "a").result()


@pytest.mark.parametrize(
    "value",
    [
        {"regex": ""},
        {"regex": "\ud800"},
        {"grammar": 'start: "\ud800"'},
        {"choice": ["a", "\ud800"]},
        {"json": {"enum": ["\ud800"]}},
        {"json": {"const": float("inf")}},
    ],
)
def test_what_can_be_no_grammar_is_refused(value):
    with pytest.raises(ProtocolError, match="structured_outputs"):
        read_structured_outputs(value)
