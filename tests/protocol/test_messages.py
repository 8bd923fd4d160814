"""Faults of messages: all of them, with index and field, and nothing but faults whatever a client sends."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41jax.protocol import ProtocolError, encode_chat
from v41jax.protocol.json_text import NESTING_LIMIT


def faults(messages: object, **arguments) -> dict[str, str]:
    """Faults by field."""
    with pytest.raises(ProtocolError) as caught:
        encode_chat(messages, **arguments)
    return dict(caught.value.faults)


def call(call_id: object = "c", name: object = "f", arguments: object = "{}") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": "u"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call("c"), call("d")]}


def result(call_id: object) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": "r"}


def test_all_faults_are_reported_together_with_index_and_field():
    messages = [
        {"role": "root", "content": "a"},
        {"role": "user", "content": 7},
        "hello",
        {"role": "user", "content": [{"type": "text"}, {"type": "video"}, 3]},
        {"role": "assistant", "content": "a", "tool_calls": [{"function": {}}, {"function": {"name": "f"}}, None]},
        {"role": "user", "content": "a", "task": "dance"},
        {"role": "assistant", "content": "a", "wo_eos": "yes", "reasoning_content": 1, "tool_calls": {}},
        {"role": "system", "content": "a", "tools": [{"function": {"name": "f"}}, 1], "response_format": []},
        {"role": "tool", "content": "a", "tool_call_id": 4},
    ]
    found = faults(messages, thinking_mode="deep", reasoning_effort=0, drop_thinking="no", tools={})
    assert list(found) == [
        "thinking_mode",
        "reasoning_effort",
        "drop_thinking",
        "tools",
        "messages[0].role",
        "messages[1].content",
        "messages[2]",
        "messages[3].content[0].text",
        "messages[3].content[1].type",
        "messages[3].content[2]",
        "messages[4].tool_calls[0].function.name",
        "messages[4].tool_calls[2]",
        "messages[5].task",
        "messages[6].reasoning_content",
        "messages[6].wo_eos",
        "messages[6].tool_calls",
        "messages[7].tools[1]",
        "messages[7].response_format",
        "messages[8].tool_call_id",
    ]


def test_the_error_text_names_value_and_rule_and_stays_short():
    with pytest.raises(ProtocolError) as caught:
        encode_chat([{"role": "x" * 10_000}] * 50)
    assert caught.value.param == "messages[0].role"
    assert "must be one of system, developer, user, assistant, tool, latest_reminder, got 'xxx" in str(caught.value)
    assert str(caught.value).endswith("and 30 more faults")
    assert len(str(caught.value)) < 5_000


@pytest.mark.parametrize("messages", [None, 5, "hi", {"role": "user"}, b"x"])
def test_messages_must_be_a_list(messages: object):
    assert list(faults(messages)) == ["messages"]


def test_there_must_be_a_message():
    assert faults([]) == {"messages": "must hold at least one message"}
    assert faults([], context=[USER]) == {"messages": "must hold at least one message"}


def test_faults_of_the_context_name_the_context():
    assert list(faults([USER], context=[{"role": "user", "content": 1}])) == ["context[0].content"]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "latest_reminder"])
def test_null_fields_are_absent_fields(role: str):
    fields = ("content", "content_blocks", "tools", "response_format", "reasoning", "reasoning_content", "tool_calls")
    bare = {"role": role}
    full = {"role": role, **dict.fromkeys((*fields, "tool_call_id", "task", "wo_eos", "name", "refusal"))}
    assert encode_chat([bare]).text == encode_chat([full]).text


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        ([USER, {**CALLING, "tool_calls": [call(None)]}], "messages[1].tool_calls[0].id", "non-empty string"),
        ([USER, {**CALLING, "tool_calls": [call("")]}], "messages[1].tool_calls[0].id", "non-empty string"),
        (
            [USER, {**CALLING, "tool_calls": [call(arguments="[]")]}],
            "messages[1].tool_calls[0].function.arguments",
            "JSON",
        ),
        (
            [USER, {**CALLING, "tool_calls": [call(arguments="")]}],
            "messages[1].tool_calls[0].function.arguments",
            "JSON",
        ),
        (
            [USER, {**CALLING, "tool_calls": [call(arguments=None)]}],
            "messages[1].tool_calls[0].function.arguments",
            "JSON",
        ),
        ([USER, CALLING, result("c"), USER], "messages[3]", "results of the tool calls 'd'"),
        ([USER, CALLING, {"role": "system", "content": "s"}], "messages[2]", "results of the tool calls 'c', 'd'"),
        ([USER, CALLING, CALLING], "messages[2]", "results of the tool calls 'c', 'd'"),
        ([USER, CALLING, result("c"), result("x")], "messages[3].tool_call_id", "matches no earlier tool call"),
        ([USER, CALLING, result(None)], "messages[2].tool_call_id", "must name the call"),
        ([USER, CALLING, result("")], "messages[2].tool_call_id", "must name the call"),
        ([{"role": "tool", "content": [{"type": "audio"}]}], "messages[0].content[0].type", "must be one of"),
        (
            [{"role": "user", "content_blocks": [{"type": "tool_result", "content": "r"}]}],
            "messages[0].content_blocks[0].tool_use_id",
            "must name the call",
        ),
    ],
)
def test_a_server_refuses_what_the_encoder_could_render(messages: list, field: str, words: str):
    encode_chat(messages)
    assert words in faults(messages, strict=True)[field]


@pytest.mark.parametrize(
    "messages",
    [
        [USER, CALLING],
        [USER, CALLING, result("d")],
        [USER, CALLING, result("d"), result("c"), USER],
        [USER, CALLING, result("d"), result("c"), CALLING, result("c"), result("d")],
        [USER, {**CALLING, "tool_calls": []}, USER],
        [result("c")],
        [
            USER,
            CALLING,
            {
                "role": "user",
                "content_blocks": [
                    {"type": "tool_result", "tool_use_id": "d", "content": "r"},
                    {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "r"}]},
                ],
            },
            USER,
        ],
    ],
)
def test_complete_tool_conversations_pass_the_strict_reading(messages: list):
    assert encode_chat(messages, strict=True).text == encode_chat(messages).text


def test_a_bare_name_in_history_may_not_mean_a_namespaced_tool():
    tools = [{"type": "function", "namespace": "math", "function": {"name": "add"}}]
    messages = [USER, {**CALLING, "tool_calls": [call(name="add")]}]
    found = faults(messages, tools=tools, strict=True)
    assert "only declared as math::add" in found["messages[1].tool_calls[0].function.name"]
    encode_chat(messages, tools=[*tools, {"type": "function", "function": {"name": "add"}}], strict=True)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "\ud800"},
        {"role": "user", "content": [{"type": "text", "text": "a\udfff"}]},
        {"role": "assistant", "content": "", "reasoning_content": "\ud800"},
        {"role": "assistant", "content": "", "tool_calls": [call(name="\ud800")]},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments={"k": "\ud800"})]},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments={"k": ["\ud800"]})]},
        {"role": "assistant", "content": "", "tool_calls": [call(arguments={"\ud800": 1})]},
        {"role": "system", "content": "", "response_format": {"k": "\ud800"}},
        {"role": "tool", "content": "", "tool_call_id": "\ud800"},
    ],
)
def test_lone_surrogates_are_faults(message: dict):
    assert all("lone surrogate U+D" in text for text in faults([message]).values())


def test_a_surrogate_escape_in_argument_text_is_not_json():
    messages = [USER, {**CALLING, "tool_calls": [call(arguments='{"k": "\\ud800"}')]}]
    assert 'name="arguments" string="true">{"k": "\\ud800"}<' in encode_chat(messages).text
    assert list(faults(messages, strict=True)) == ["messages[1].tool_calls[0].function.arguments"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"k":' * 100_000, '{"k": ' + "9" * 5_000 + "}", '{"k": 1e999}'])
def test_argument_text_that_breaks_readers_is_passed_as_a_string(text: str):
    messages = [USER, {**CALLING, "tool_calls": [call(arguments=text)]}]
    assert f'name="arguments" string="true">{text}</' in encode_chat(messages).text


def test_deep_nesting_is_a_fault_and_not_a_crash():
    deep: object = 1
    for _ in range(NESTING_LIMIT + 1):
        deep = [deep]
    message = {"role": "assistant", "content": "", "tool_calls": [call(arguments={"k": deep})]}
    assert list(faults([message])) == ["messages[0].tool_calls[0].function.arguments.'k'"]
    assert list(faults([{"role": "system", "response_format": {"k": deep}}])) == ["messages[0].response_format"]
    assert list(faults([USER], tools=[{"type": "function", "function": {"name": "f", "parameters": {"k": deep}}}])) == [
        "tools[0].function"
    ]
    for _ in range(5_000):
        deep = [deep]
    assert list(faults([{"role": deep, "content": deep}])) == ["messages[0].role"]


def test_many_messages_cost_linear_time():
    """Each of these was quadratic in some plausible implementation; at this size quadratic means minutes."""
    calls = [call(f"c{index}") for index in range(30_000)]
    answers = [result(f"c{index}") for index in reversed(range(30_000))]
    prompt = encode_chat([*[USER] * 30_000, {**CALLING, "tool_calls": calls}, *answers], strict=True)
    assert prompt.text.count("<tool_result>") == 30_000


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "latest_reminder"])
parts = st.fixed_dictionaries({"type": st.sampled_from(["text", "image", "x"])}, optional={"text": json_values})
functions = st.fixed_dictionaries(
    {}, optional={"name": json_values, "arguments": json_values, "namespace": json_values}
)
odd_calls = st.fixed_dictionaries({"function": functions | json_values}, optional={"id": json_values})
blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "tool_result"])},
    optional={"text": json_values, "content": json_values, "tool_use_id": json_values},
)
messages_of_any_kind = st.lists(
    st.fixed_dictionaries(
        {"role": roles | json_values},
        optional={
            "content": st.text(max_size=5) | st.lists(parts, max_size=3) | json_values,
            "content_blocks": st.lists(blocks, max_size=3) | json_values,
            "tools": st.lists(odd_calls, max_size=2) | json_values,
            "response_format": json_values,
            "reasoning_content": json_values,
            "reasoning": json_values,
            "tool_calls": st.lists(odd_calls, max_size=2) | json_values,
            "tool_call_id": json_values,
            "task": st.just("title") | json_values,
            "wo_eos": json_values,
        },
    )
    | json_values,
    max_size=4,
)


@settings(max_examples=400, deadline=None)
@given(messages_of_any_kind, json_values, json_values, st.booleans())
def test_whatever_is_sent_gives_a_prompt_or_faults(
    messages: list, tools: object, response_format: object, strict: bool
):
    try:
        prompt = encode_chat(messages, tools=tools, response_format=response_format, strict=strict)
    except ProtocolError as error:
        assert error.faults and all(fault.param and fault.message for fault in error.faults)
        json.dumps([str(fault) for fault in error.faults]).encode()
    else:
        prompt.text.encode()
