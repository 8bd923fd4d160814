"""Tool lists and `tool_choice`."""

from __future__ import annotations

import pytest

from v41jax.protocol import ProtocolError, ToolChoice, normalize_tools, read_tool_choice


def tool(name: object, **fields) -> dict:
    return {"type": "function", "function": {"name": name}, **fields}


TOOLS = normalize_tools([tool("f"), tool("add", namespace="math"), tool("g")])


@pytest.mark.parametrize("tools", [None, [], ()])
def test_nothing_declares_nothing(tools: object):
    assert normalize_tools(tools) == ()


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ("f", "tools"),
        ({"f": 1}, "tools"),
        ([None], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "name": "f"}], "tools[0].function"),
        ([tool("")], "tools[0].function.name"),
        ([tool(None)], "tools[0].function.name"),
        ([tool("a b")], "tools[0].function.name"),
        ([tool('a">')], "tools[0].function.name"),
        ([tool("a" * 65)], "tools[0].function.name"),
        ([tool("a::b::c")], "tools[0].function.name"),
        ([tool("::b")], "tools[0].function.name"),
        ([tool("a::")], "tools[0].function.name"),
        ([tool("f"), tool("f")], "tools[1].function.name"),
        ([tool("a::f"), tool("f", namespace="a")], "tools[1].function.name"),
        ([tool("a::f", namespace="b")], "tools[0].namespace"),
        ([tool("f", namespace=3)], "tools[0].namespace"),
        ([tool("f", namespace="a::b")], "tools[0].namespace"),
        ([tool("f", namespace={"title": "a"})], "tools[0].namespace"),
        ([{"type": "function", "function": {"name": "f", "parameters": []}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "f", "parameters": None}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "f", "x": float("nan")}}], "tools[0].function"),
        ([{"type": "function", "function": {"name": "f", "x": {1}}}], "tools[0].function"),
    ],
)
def test_a_malformed_tool_is_named(tools: object, field: str):
    with pytest.raises(ProtocolError) as caught:
        normalize_tools(tools)
    assert [fault.param for fault in caught.value.faults] == [field]


def test_every_malformed_tool_is_named():
    with pytest.raises(ProtocolError) as caught:
        normalize_tools([tool("a b"), tool("f"), None, tool("f")])
    fields = ["tools[0].function.name", "tools[2]", "tools[3].function.name"]
    assert [fault.param for fault in caught.value.faults] == fields


def test_the_longest_qualified_name_fits():
    assert normalize_tools([tool("a" * 64, namespace="b" * 64)])[0].name == "b" * 64 + "::" + "a" * 64


def test_the_callers_list_is_not_changed():
    entry = {"type": "function", "function": {"name": "add", "namespace": "math"}}
    assert normalize_tools([entry])[0].function == {"name": "math::add"}
    assert entry == {"type": "function", "function": {"name": "add", "namespace": "math"}}


def test_normalized_tools_pass_through():
    assert normalize_tools(TOOLS) == TOOLS


@pytest.mark.parametrize("schema", [None, {}, {"properties": 3}, {"properties": {"a": {"type": "string"}}}])
def test_parameters_are_read_from_whatever_schema(schema: dict | None):
    function = {"name": "f"} if schema is None else {"name": "f", "parameters": schema}
    expected = {"a": {"type": "string"}} if schema and schema.get("properties") != 3 else {}
    assert normalize_tools([{"type": "function", "function": function}])[0].parameters == expected


@pytest.mark.parametrize(
    ("choice", "expected", "offered"),
    [
        (None, ToolChoice("auto"), ["f", "math::add", "g"]),
        ("auto", ToolChoice("auto"), ["f", "math::add", "g"]),
        ("none", ToolChoice("none"), []),
        ("required", ToolChoice("required"), ["f", "math::add", "g"]),
        (tool("g"), ToolChoice("named", "g"), ["g"]),
        (tool("math::add"), ToolChoice("named", "math::add"), ["math::add"]),
        (tool("add", namespace="math"), ToolChoice("named", "math::add"), ["math::add"]),
    ],
)
def test_choice_and_what_it_offers(choice: object, expected: ToolChoice, offered: list[str]):
    assert read_tool_choice(choice, TOOLS) == expected
    assert [tool.name for tool in expected.offered(TOOLS)] == offered


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_choice_without_tools(choice: object):
    assert read_tool_choice(choice, ()).offered(()) == ()


@pytest.mark.parametrize(
    ("choice", "field", "words"),
    [
        ("any", "tool_choice", "must be 'auto', 'none', 'required'"),
        (True, "tool_choice", "must be"),
        ({}, "tool_choice", "must be"),
        ({"type": "function"}, "tool_choice.function", "must be an object"),
        ({"type": "function", "function": {}}, "tool_choice.function.name", "non-empty"),
        (tool("h"), "tool_choice.function.name", "'h' is not a declared tool (declared: f, math::add, g)"),
        (tool("add"), "tool_choice.function.name", "only declared as math::add"),
        (tool("f", namespace="math"), "tool_choice.function.name", "not a declared tool"),
    ],
)
def test_a_malformed_choice_is_named(choice: object, field: str, words: str):
    with pytest.raises(ProtocolError) as caught:
        read_tool_choice(choice, TOOLS)
    assert caught.value.param == field
    assert words in caught.value.faults[0].message


def test_required_needs_tools():
    with pytest.raises(ProtocolError, match="'required' needs `tools`"):
        read_tool_choice("required", ())
