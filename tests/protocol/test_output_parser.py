"""The output parser: the published fixtures whole and at every split, coercion, truncation, and what may stream."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.worked_prompts import WEATHER, WORKED_PROMPTS
from v41jax.protocol import (
    ArgumentsDelta,
    CallFinished,
    CallStarted,
    ContentDelta,
    Event,
    OutputParser,
    ReasoningDelta,
    Reply,
    Tool,
    ToolCall,
    finish_reason,
    normalize_tools,
    parse_reply,
)
from v41jax.protocol.json_text import canonical_json

CALLS, END_CALLS = "<｜DSML｜ calls>", "</｜DSML｜ calls>"
END_INV, END_P = "</｜DSML｜ invoke>", "</｜DSML｜ parameter>"


def inv(name: str) -> str:
    return f'<｜DSML｜ invoke name="{name}">'


def p(key: str, is_string: str | None = None) -> str:
    attribute = "" if is_string is None else f' string="{is_string}"'
    return f'<｜DSML｜ parameter name="{key}"{attribute}>'


def block(*lines: str) -> str:
    return "\n".join([CALLS, *lines, END_CALLS])


def run(
    pieces: Iterable[str], thinking: bool = False, tools: Iterable[Tool] | None = None
) -> tuple[list[Event], Reply]:
    parser = OutputParser(thinking, tools)
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return events, parser.reply


def joined(events: Iterable[Event]) -> list[Event]:
    """Events with neighbouring deltas of one kind put together."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            result[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == event.index:
            result[-1] = ArgumentsDelta(event.index, last.fragment + event.fragment)
        else:
            result.append(event)
    return result


class Fixture(NamedTuple):
    thinking: bool
    text: str
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    truncated: bool = False


P10_REPLY = WORKED_PROMPTS["P10"].prompt.split("<｜Assistant｜><think>")[1].split("<｜end▁of▁sentence｜>")[0]
MATH_CALL = block(inv("math::add"), p("a", "false") + "17" + END_P, p("b", "false") + "25" + END_P, END_INV)
TWO_VALUES = block(inv("f"), p("n", "false") + "twelve" + END_P, p("s", "true") + 'a "b"\n<x> </y>' + END_P, END_INV)
ODD_TEXT = "a < b and <thin air> \n\n<｜DSML｜ callsign> fine"

FIXTURES = {
    1: Fixture(True, "Two is prime.</think>2", "Two is prime.", "2", []),
    2: Fixture(False, "2", "", "2", []),
    3: Fixture(
        True,
        P10_REPLY,
        "Need both.",
        "Checking.",
        [("get_weather", '{"city": "Oslo", "days": 2}'), ("get_weather", '{"city": "Rome"}')],
    ),
    4: Fixture(False, MATH_CALL + " trailing", "", "", [("math::add", '{"a": 17, "b": 25}')]),
    5: Fixture(False, block(inv("g"), "", END_INV), "", "", [("g", "{}")]),
    6: Fixture(False, "ok\n\n" + TWO_VALUES, "", "ok", [("f", '{"n": "twelve", "s": "a \\"b\\"\\n<x> </y>"}')]),
    7: Fixture(False, inv("f") + "\n" + p("s", "true") + "hal", "", "", [("f", '{"s": "hal"}')], True),
    8: Fixture(
        False,
        "\n".join([CALLS, inv("f"), p("s", "true") + "x" + END_P, p("n", "false") + "[1, 2"]),
        "",
        "",
        [("f", '{"s": "x"}')],
        True,
    ),
    9: Fixture(
        True, "Thinking " + block(inv("f"), p("k") + "7" + END_P, END_INV), "Thinking ", "", [("f", '{"k": 7}')]
    ),
    10: Fixture(True, "never closed", "never closed", "", []),
    11: Fixture(False, ODD_TEXT, "", ODD_TEXT, []),
    12: Fixture(
        False,
        "x\n\n" + block(inv("f"), p("a", "true") + "1" + p("b", "true") + "2" + END_P, END_INV),
        "",
        "x",
        [("f", '{"a": "1", "b": "2"}')],
    ),
    13: Fixture(False, "</think>Hi<think>hm</think> there", "hm", "Hi there", []),
}
fixtures = pytest.mark.parametrize("fixture", FIXTURES.values(), ids=FIXTURES.keys())


def check(fixture: Fixture, reply: Reply) -> None:
    assert (reply.reasoning, reply.content) == (fixture.reasoning, fixture.content)
    assert [(call.name, call.arguments) for call in reply.calls] == fixture.calls
    assert reply.is_truncated == fixture.truncated


def check_events(events: list[Event], reply: Reply) -> None:
    """The events tell the same story as the reply, in the order a stream must have."""
    assert "".join(event.text for event in events if isinstance(event, ReasoningDelta)) == reply.reasoning
    assert "".join(event.text for event in events if isinstance(event, ContentDelta)) == reply.content
    started = [event for event in events if isinstance(event, CallStarted)]
    assert [(event.index, event.name) for event in started] == [(k, call.name) for k, call in enumerate(reply.calls)]
    for index, call in enumerate(reply.calls):
        mine = [event for event in events if getattr(event, "index", None) == index]
        assert isinstance(mine[0], CallStarted) and mine[-1] == CallFinished(index, call.is_truncated)
        deltas = [event for event in mine[1:-1] if isinstance(event, ArgumentsDelta)]
        assert len(deltas) == len(mine) - 2
        assert all(delta.fragment for delta in deltas)
        assert "".join(delta.fragment for delta in deltas) == call.arguments
        assert canonical_json(json.loads(call.arguments)) == call.arguments


@fixtures
def test_fixture_whole(fixture: Fixture):
    events, reply = run([fixture.text], fixture.thinking)
    check(fixture, reply)
    check_events(events, reply)
    assert parse_reply(fixture.text, fixture.thinking) == reply


@fixtures
def test_fixture_at_every_two_way_split(fixture: Fixture):
    expected = joined(run([fixture.text], fixture.thinking)[0])
    for cut in range(len(fixture.text) + 1):
        events, reply = run([fixture.text[:cut], fixture.text[cut:]], fixture.thinking)
        check(fixture, reply)
        check_events(events, reply)
        assert joined(events) == expected


@fixtures
def test_fixture_character_by_character(fixture: Fixture):
    events, reply = run(fixture.text, fixture.thinking)
    check(fixture, reply)
    check_events(events, reply)
    assert joined(events) == joined(run([fixture.text], fixture.thinking)[0])


@fixtures
def test_fixture_cut_anywhere_is_the_same_in_pieces_and_whole(fixture: Fixture):
    for end in range(len(fixture.text)):
        text = fixture.text[:end]
        events, reply = run(text, fixture.thinking)
        check_events(events, reply)
        assert reply == parse_reply(text, fixture.thinking)


scraps = st.lists(
    st.sampled_from(
        [
            *(
                "<think>",
                "</think>",
                CALLS,
                END_CALLS,
                END_INV,
                END_P,
                "\n",
                "\n\n",
                " ",
                '"',
                ">",
                "<",
                "</",
                "｜DSML｜",
            ),
            *(
                inv("f"),
                inv("get_weather"),
                inv("f")[:-2],
                p("a", "true"),
                p("a", "false"),
                p("city"),
                p("input", "false"),
            ),
            *(p("arguments", "true"), '<｜DSML｜ parameter name = "b"  string = "false" >', "<｜DSML｜ parameter\n"),
            *("x", "7", "[1, 2]", '{"city": "Oslo"}', '{"k": "\\ud800"}', "null", "1e999", "é二😀"),
        ]
    ),
    max_size=14,
)
tool_lists = st.sampled_from([None, (), normalize_tools([WEATHER])])


@settings(max_examples=600, deadline=None)
@given(scraps, st.data(), st.booleans(), tool_lists)
def test_any_text_gives_the_same_in_any_pieces(parts: list[str], data: st.DataObject, thinking: bool, tools):
    text = "".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, reply = run([text], thinking, tools)
    for cut in (pieces, list(text)):
        events, again = run(cut, thinking, tools)
        assert again == reply
        assert joined(events) == joined(whole)
    check_events(whole, reply)
    json.dumps(reply.message()).encode()
    for call in reply.calls:
        call.arguments.encode()


@settings(max_examples=300, deadline=None)
@given(scraps, st.booleans())
def test_no_complete_marker_is_emitted_as_text(parts: list[str], thinking: bool):
    for pieces in (["".join(parts)], "".join(parts)):
        for event in run(pieces, thinking)[0]:
            if isinstance(event, ReasoningDelta | ContentDelta):
                assert not any(marker in event.text for marker in ("<think>", "</think>", CALLS))
            if isinstance(event, ContentDelta):
                assert '<｜DSML｜ invoke name="' not in event.text


def test_exactly_one_blank_line_belongs_to_the_markup():
    calls = block(inv("g"), "", END_INV)
    for before, content in {"": "", "\n": "\n", "\n\n": "", "\n\n\n": "\n", "a\n": "a\n", "a\n\n\n\n": "a\n\n"}.items():
        assert parse_reply(before + calls, False).content == content
        assert parse_reply("</think>" + before + calls, True).content == content
        assert parse_reply(before + calls, True).reasoning == content


def test_text_after_the_calls_is_discarded():
    calls = block(inv("g"), "", END_INV)
    reply = parse_reply(f"a\n\n{calls}\n\nb<think>c</think>d", False)
    assert (reply.reasoning, reply.content, len(reply.calls)) == ("", "a", 1)


def test_calls_go_on_after_the_block_closed():
    one = block(inv("g"), "", END_INV)
    assert [call.name for call in parse_reply(one + one + inv("h") + END_INV, False).calls] == ["g", "g", "h"]


def test_a_bare_invoke_opens_a_call_in_content_but_not_in_reasoning():
    text = inv("g") + END_INV
    assert parse_reply(text, False).calls == (ToolCall("g", "{}"),)
    assert parse_reply(text, True) == Reply(text, "", (), False)


def test_a_missing_invoke_closer_starts_the_next_call():
    reply = parse_reply(block(inv("f"), p("a", "true") + "1" + END_P, inv("g"), "", END_INV), False)
    assert [(call.name, call.arguments) for call in reply.calls] == [("f", '{"a": "1"}'), ("g", "{}")]


@pytest.mark.parametrize("closer", [p("b", "true"), END_INV, END_CALLS, CALLS])
def test_a_value_without_closer_ends_at_the_next_tag(closer: str):
    reply = parse_reply(CALLS + inv("f") + p("a", "true") + "1" + closer, False)
    assert reply.calls[0].arguments.startswith('{"a": "1"')


def test_an_invoke_opener_inside_a_value_is_part_of_it():
    reply = parse_reply(block(inv("f"), p("a", "true") + inv("g") + END_P, END_INV), False)
    assert json.loads(reply.calls[0].arguments) == {"a": inv("g")}


@pytest.mark.parametrize(
    "head",
    [
        '<｜DSML｜ parameter name="a" string="true">',
        '<｜DSML｜ parameter\n\tname="a"\n string="true">',
        '<｜DSML｜ parameter   name = "a"   string = "true"  >',
        '<｜DSML｜ parameter name="a"string="true">',
    ],
)
def test_a_parameter_head_is_flexible_in_spacing(head: str):
    text = block(inv("f"), head + "7" + END_P, END_INV)
    for pieces in ([text], text):
        assert run(pieces)[1].calls[0].arguments == '{"a": "7"}'


@pytest.mark.parametrize("key", ["a>b", "a<b", "a\nb", "ключ", "", "a b"])
def test_a_parameter_name_may_hold_anything_but_quotes(key: str):
    text = block(inv("f"), p(key, "false") + "7" + END_P, END_INV)
    for pieces in ([text], text):
        assert json.loads(run(pieces)[1].calls[0].arguments) == {key: 7}


@pytest.mark.parametrize(
    "head",
    [
        "<｜DSML｜ parameter >",
        "<｜DSML｜ parameter foo>",
        '<｜DSML｜ parameter string="true">',
        "<｜DSML｜ parameter name=a>",
    ],
)
def test_a_malformed_head_costs_only_its_own_value(head: str):
    text = block(inv("f"), head + "7" + END_P, p("b", "false") + "8" + END_P, END_INV)
    for pieces in ([text], text):
        assert run(pieces)[1].calls == (ToolCall("f", '{"b": 8}'),)


def test_a_head_cut_by_a_tag_is_dropped_and_the_tag_counts():
    text = CALLS + inv("f") + "<｜DSML｜ parameter " + p("b", "false") + "8" + END_P + END_INV + END_CALLS
    for pieces in ([text], text):
        assert run(pieces)[1].calls == (ToolCall("f", '{"b": 8}'),)


def coerced(value: str, attribute: str | None, tools=None, key: str = "a", name: str = "f") -> object:
    text = block(inv(name), p(key, attribute) + value + END_P, END_INV)
    return json.loads(parse_reply(text, False, tools).calls[0].arguments)[key]


@pytest.mark.parametrize(
    ("value", "attribute", "expected"),
    [
        ("12", "true", "12"),
        (" a\n", "true", " a\n"),
        ('"x"', "true", '"x"'),
        ("12", "false", 12),
        ("\n12 \n", "false", 12),
        ('"x"', "false", "x"),
        ("null", "false", None),
        ('{"b": [true, {"c": "二"}]}', "false", {"b": [True, {"c": "二"}]}),
        ("twelve", "false", "twelve"),
        ("{'a': 1}", "false", "{'a': 1}"),
        ("", "false", ""),
        ("NaN", "false", "NaN"),
        ("-Infinity", "false", "-Infinity"),
        ("1e999", "false", "1e999"),
        ('"\\ud800"', "false", '"\\ud800"'),
        ('"\\ud83d\\ude00"', "false", "😀"),
        ("[" * 200 + "]" * 200, "false", "[" * 200 + "]" * 200),
        ("9" * 5000, "false", "9" * 5000),
        ("12", None, 12),
        ("twelve", None, "twelve"),
        ("12", "maybe", 12),
    ],
)
def test_coercion(value: str, attribute: str | None, expected: object):
    assert coerced(value, attribute) == expected


def test_a_missing_attribute_asks_the_declared_schema():
    tools = normalize_tools([WEATHER])
    assert coerced("12", None, tools, "city", "get_weather") == "12"
    assert coerced("12", None, tools, "days", "get_weather") == 12
    assert coerced("12", None, tools, "city", "other") == 12


def test_the_first_of_two_parameters_with_one_name_counts():
    text = block(
        inv("f"), p("a", "true") + "1" + END_P, p("b", "true") + "x" + END_P, p("a", "false") + "2" + END_P, END_INV
    )
    for pieces in ([text], text):
        assert run(pieces)[1].calls == (ToolCall("f", '{"a": "1", "b": "x"}'),)


def weather_call(*parameters: str) -> str:
    return block(inv("get_weather"), *parameters, END_INV)


@pytest.mark.parametrize("key", ["arguments", "input"])
@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("false", '{"city": "Oslo", "days": 2}', {"city": "Oslo", "days": 2}),
        ("true", '{"city": "Oslo"}', {"city": "Oslo"}),
        ("false", '"{\\"city\\": \\"Oslo\\"}"', {"city": "Oslo"}),
        ("false", "{}", {}),
        ("false", '{"city": "Oslo", "color": 1}', None),
        ("true", "Oslo", None),
        ("false", "[1]", None),
    ],
)
def test_a_wrapper_of_all_arguments_is_taken_off(key: str, attribute: str, value: str, expected: dict | None):
    text = weather_call(p(key, attribute) + value + END_P)
    kept = {key: value if attribute == "true" else json.loads(value)}
    for pieces in ([text], text):
        events, reply = run(pieces, tools=normalize_tools([WEATHER]))
        check_events(events, reply)
        assert json.loads(reply.calls[0].arguments) == (kept if expected is None else expected)
    assert json.loads(parse_reply(text, False).calls[0].arguments) == kept  # nothing is known to be declared


@pytest.mark.parametrize("company", [("days", "2"), ("other", '{"city": "y"}')])
def test_a_wrapper_with_company_stays(company: tuple[str, str]):
    key, value = company
    text = weather_call(p("input", "false") + '{"city": "x"}' + END_P, p(key, "false") + value + END_P)
    expected = f'{{"input": {{"city": "x"}}, "{key}": {value}}}'
    assert run([text], tools=normalize_tools([WEATHER]))[1].calls[0].arguments == expected


def test_a_wrapper_whose_company_was_cut_is_alone():
    text = CALLS + inv("get_weather") + p("input", "false") + '{"city": "x"}' + END_P + p("days", "false") + "[1"
    for pieces in ([text], text):
        reply = run(pieces, tools=normalize_tools([WEATHER]))[1]
        assert reply.calls == (ToolCall("get_weather", '{"city": "x"}', True),)


def test_a_declared_parameter_called_input_is_no_wrapper():
    schema = {"type": "object", "properties": {"input": {}, "city": {}}}
    tools = normalize_tools([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    text = block(inv("f"), p("input", "false") + '{"city": 1}' + END_P, END_INV)
    assert parse_reply(text, False, tools).calls[0].arguments == '{"input": {"city": 1}}'


def test_a_string_value_streams_as_it_arrives():
    parser = OutputParser(False)
    parser.feed(inv("f") + "\n" + p("s", "true"))
    assert parser.feed('ab"\n') == [ArgumentsDelta(0, 'ab\\"\\n')]
    assert parser.feed("c<") == [ArgumentsDelta(0, "c")]
    assert parser.feed("d") == [ArgumentsDelta(0, "<d")]


def test_another_value_waits_for_its_closer():
    parser = OutputParser(False)
    assert parser.feed(inv("f") + p("n", "false") + "[1,") == [CallStarted(0, "f")]
    assert parser.feed("2]") == []
    assert parser.feed(END_P) == [ArgumentsDelta(0, '{"n": [1, 2]')]
    assert parser.feed(END_INV) == [ArgumentsDelta(0, "}"), CallFinished(0, False)]


def test_a_possible_wrapper_holds_the_arguments_but_not_the_name():
    parser = OutputParser(False, normalize_tools([WEATHER]))
    events = parser.feed(inv("get_weather") + p("input", "true") + '{"city"' + ': "x"}' + END_P)
    assert events == [CallStarted(0, "get_weather")]
    assert parser.feed(END_INV) == [ArgumentsDelta(0, '{"city": "x"}'), CallFinished(0, False)]


def test_content_is_held_only_while_it_may_be_markup():
    parser = OutputParser(False)
    assert parser.feed("a\n\n<｜DS") == [ContentDelta("a")]
    assert parser.feed("P") == [ContentDelta("\n\n<｜DSP")]
    assert parser.feed("\n") == []
    assert parser.finish() == [ContentDelta("\n")]


@pytest.mark.parametrize("end", ["", "\n", p("b", "true")[:-3], "</｜DSML｜ inv"])
def test_a_call_cut_between_parameters_keeps_the_complete_ones(end: str):
    text = CALLS + inv("f") + p("a", "true") + "1" + END_P + end
    assert parse_reply(text, False) == Reply("", "", (ToolCall("f", '{"a": "1"}', True),), True)


@pytest.mark.parametrize(
    ("value", "attribute", "arguments"),
    [
        ("ha", "true", '{"a": "ha"}'),
        ("ha</｜DSML｜ para", "true", '{"a": "ha</｜DSML｜ para"}'),
        ("", "true", '{"a": ""}'),
        ("[1, 2]", "false", '{"a": [1, 2]}'),
        ("[1, 2", "false", "{}"),
        ("twel", "false", "{}"),
        ("12", None, '{"a": 12}'),
        ("twel", None, "{}"),
    ],
)
def test_a_value_cut_short(value: str, attribute: str | None, arguments: str):
    text = CALLS + inv("f") + p("a", attribute) + value
    for pieces in ([text], text):
        assert run(pieces)[1].calls == (ToolCall("f", arguments, True),)


@pytest.mark.parametrize("text", [CALLS, CALLS + inv("f")[:-1], CALLS + "\n<｜DSML｜ inv", inv("f")[:-2]])
def test_a_call_cut_in_its_name_is_nothing(text: str):
    events, reply = run([text])
    assert events == [] and reply == Reply("", "", (), True)


def test_a_truncated_call_of_an_undeclared_tool_vanishes_without_a_trace():
    tools = normalize_tools([WEATHER])
    text = "a" + CALLS + inv("get_weather") + END_INV + inv("other") + p("a", "true") + "x"
    for pieces in ([text], text):
        events, reply = run(pieces, tools=tools)
        check_events(events, reply)
        assert [call.name for call in reply.calls] == ["get_weather"]
        assert reply.is_truncated
    complete = run([text + END_P + END_INV], tools=tools)[1]
    assert complete.calls[1] == ToolCall("other", '{"a": "x"}')


@pytest.mark.parametrize(
    ("text", "hit_limit", "reason"),
    [
        ("hi", False, "stop"),
        ("hi", True, "length"),
        (block(inv("g"), END_INV), False, "tool_calls"),
        (block(inv("g"), END_INV), True, "tool_calls"),
        (block(inv("g"), END_INV) + inv("h"), True, "length"),
        (inv("g"), True, "length"),
        (inv("g"), False, "tool_calls"),
        (CALLS, False, "stop"),
    ],
)
def test_finish_reason(text: str, hit_limit: bool, reason: str):
    assert finish_reason(parse_reply(text, False), hit_limit=hit_limit) == reason


def test_messages_of_replies():
    reply = parse_reply("r</think>c\n\n" + block(inv("g"), "", END_INV), True)
    function = {"name": "g", "arguments": "{}"}
    assert reply.message(("id",)) == {
        "role": "assistant",
        "reasoning_content": "r",
        "content": "c",
        "tool_calls": [{"id": "id", "type": "function", "function": function}],
    }
    assert parse_reply("", False).message() == {"role": "assistant", "content": ""}
    assert parse_reply(inv("g"), False).message()["content"] is None


def test_a_finished_parser_says_so():
    parser = OutputParser(False)
    with pytest.raises(RuntimeError, match="not complete"):
        _ = parser.reply
    parser.feed("a")
    parser.finish()
    assert parser.finish() == []
    with pytest.raises(RuntimeError, match="finished"):
        parser.feed("b")


def test_cost_is_linear_in_the_text():
    """A megabyte in small pieces, and a megabyte of markup in one: quadratic would take many minutes."""
    value = 'x"<｜' * 250_000
    text = inv("f") + p("s", "true") + value + END_P + END_INV
    _, reply = run(text[k : k + 64] for k in range(0, len(text), 64))
    assert json.loads(reply.calls[0].arguments)["s"] == value
    assert len(parse_reply((inv("f") + p("a", "true") + END_P + END_INV) * 10_000, False).calls) == 10_000
    assert parse_reply("\n\n<" * 100_000, False).content == "\n\n<" * 100_000
