"""Prompts of `encode_chat` against the worked prompts, their digests, and the rules between them."""

from __future__ import annotations

import pytest

from tests.helpers.tokenizers import library_tokenizer, tokenizer
from tests.protocol.worked_prompts import TOOLS_SECTION, WEATHER, WORKED_PROMPTS, WorkedPrompt, digest
from v41jax.protocol import ProtocolError, Segment, encode_chat
from v41jax.protocol.tokens import CONTROL_TOKENS, IMAGE

EFFORT_75 = "Reasoning Effort: 75 (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
MATH = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def text(messages: list[dict], **arguments) -> str:
    return encode_chat(messages, **arguments).text


def user(content: object) -> dict:
    return {"role": "user", "content": content}


def assistant(content: object, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def call(call_id: str, name: str = "f", arguments: object = "{}") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


worked = pytest.mark.parametrize("case", WORKED_PROMPTS.values(), ids=WORKED_PROMPTS.keys())


@worked
def test_worked_prompt_is_equal_to_the_byte(case: WorkedPrompt):
    result = text(case.messages, **case.arguments)
    assert result == case.prompt
    assert (len(result), digest(result)) == (case.characters, case.sha256)


@worked
def test_ids_of_a_worked_prompt_are_those_of_the_finished_string(case: WorkedPrompt):
    prompt = encode_chat(case.messages, tokenizer=tokenizer(), **case.arguments)
    assert prompt.token_ids == library_tokenizer().encode(prompt.text, add_special_tokens=False).ids


@worked
def test_every_control_literal_of_a_worked_prompt_is_a_control_segment(case: WorkedPrompt):
    prompt = encode_chat(case.messages, **case.arguments)
    assert all((text in CONTROL_TOKENS) == is_control for text, is_control in prompt.segments)
    assert not any(token in text for text, is_control in prompt.segments for token in CONTROL_TOKENS if not is_control)


def test_all_twenty_worked_prompts_are_here():
    assert list(WORKED_PROMPTS) == [f"P{number}" for number in range(1, 21)]


def test_tools_section_has_the_published_length_and_digest():
    assert (len(TOOLS_SECTION), digest(TOOLS_SECTION), TOOLS_SECTION[-1]) == (1145, "8acb6f809b7dd72b", "\n")


@pytest.mark.parametrize("mode", ["thinking", "chat"])
@pytest.mark.parametrize("effort", [0, 101, -1, "medium", "none", "", True, False, 37.0, 75.5, None, [75]])
def test_effort_outside_the_scale_is_refused_in_both_modes(mode: str, effort: object):
    with pytest.raises(ProtocolError, match="reasoning_effort: must be an integer from 1 to 100"):
        encode_chat([user("Hi")], thinking_mode=mode, reasoning_effort=effort)


@pytest.mark.parametrize(
    ("effort", "number"), [(1, 1), (100, 100), ("low", 50), ("high", 75), ("xhigh", 75), ("max", 100)]
)
def test_effort_names_and_bounds(effort: object, number: int):
    assert f"<｜System｜>Reasoning Effort: {number} (range" in text([user("Hi")], reasoning_effort=effort)


def test_one_opening_system_message_renders_no_header():
    messages = [{"role": "system", "content": "Be brief."}]
    assert text(messages, thinking_mode="chat") == BOS + "<｜System｜>Be brief."
    assert not encode_chat(messages).expects_reply


def test_two_assistant_turns_in_a_row_get_no_header_between_them():
    expected = f"{BOS}<｜User｜>a<｜Assistant｜></think>b{EOS}c{EOS}"
    assert text([user("a"), assistant("b"), assistant("c")], thinking_mode="chat") == expected


def test_a_reminder_as_the_last_message_gets_no_header():
    messages = [user("a"), {"role": "latest_reminder", "content": "r"}]
    assert text(messages, thinking_mode="chat") == f"{BOS}<｜User｜>a<｜Assistant｜></think><｜latest_reminder｜>r"
    assert not encode_chat(messages).expects_reply


def test_thinking_opens_an_assistant_first_conversation_with_the_effort_line():
    assert text([assistant("b")]) == f"{BOS}<｜System｜>{EFFORT_75}</think>b{EOS}"


@pytest.mark.parametrize("task", ["query", "authority", "domain", "title", "read_url"])
def test_a_task_renders_its_token_alone(task: str):
    assert text([{**user("x"), "task": task}], thinking_mode="chat") == f"{BOS}<｜User｜>x<｜{task}｜>"


def test_the_action_task_keeps_the_assistant_header():
    message = {**user("x"), "task": "action"}
    assert text([message], thinking_mode="chat").endswith("x<｜Assistant｜></think><｜action｜>")
    assert text([message]).endswith("x<｜Assistant｜><think><｜action｜>")


def test_an_answer_to_a_task_has_no_reasoning_part():
    messages = [{**user("x"), "task": "title"}, assistant("Trip", reasoning_content="hm")]
    assert text(messages).endswith(f"<｜User｜>x<｜title｜>Trip{EOS}")


def test_a_user_message_does_not_join_a_turn_with_a_task_but_a_tool_result_does():
    task = {**user("x"), "task": "title"}
    assert text([task, user("y")], thinking_mode="chat").endswith("<｜User｜>x<｜User｜>y<｜Assistant｜></think>")
    joined = text([task, {"role": "tool", "content": "r"}], thinking_mode="chat")
    assert joined.endswith("<｜User｜>x\n\n<tool_result>r</tool_result><｜title｜>")


def test_developer_becomes_system():
    developer = [{"role": "developer", "content": "d"}, user("u"), {"role": "developer", "content": "e"}]
    system = [{**message, "role": message["role"].replace("developer", "system")} for message in developer]
    for mode in ("thinking", "chat"):
        assert text(developer, thinking_mode=mode) == text(system, thinking_mode=mode)


def test_tool_results_alone_are_no_new_question():
    """Otherwise P18's reasoning would be lost."""
    messages = WORKED_PROMPTS["P18"].messages
    assert "Need both.</think>" in text(messages)
    assert "Need both." not in text([*messages, user("more")])


@pytest.mark.parametrize("place", [0, 2])
def test_reasoning_stays_once_any_message_declares_tools(place: int):
    system = {"role": "system", "content": "s"}
    messages = [system, user("a"), system, user("b"), assistant("c", reasoning_content="why"), user("d")]
    assert "why" not in text(messages)
    messages[place] = {**system, "tools": [WEATHER]}
    assert "why</think>c" in text(messages)


def test_empty_tools_declare_nothing():
    messages = [{"role": "system", "content": "s", "tools": []}, *WORKED_PROMPTS["P5"].messages]
    assert "## Tools" not in text(messages, tools=[])
    assert "Smallest is two." not in text(messages, tools=[])


def test_reasoning_and_its_alias_are_the_same_field():
    spellings = [{"reasoning_content": "why"}, {"reasoning": "why"}, {"reasoning_content": None, "reasoning": "why"}]
    rendered = {text([user("a"), assistant("b", **fields)]) for fields in spellings}
    assert rendered == {f"{BOS}<｜System｜>{EFFORT_75}<｜User｜>a<｜Assistant｜><think>why</think>b{EOS}"}


def test_request_tools_and_format_go_to_the_opening_system_turn():
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    request_format = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    at_the_message = [{"role": "system", "content": "s", "tools": [WEATHER], "response_format": schema}, user("a")]
    in_the_request = [{"role": "system", "content": "s"}, user("a")]
    assert text(at_the_message) == text(in_the_request, tools=[WEATHER], response_format=request_format)


def test_request_tools_insert_an_empty_system_turn_when_there_is_none():
    expected = f"{BOS}<｜System｜>\n\n{TOOLS_SECTION}<｜User｜>a<｜Assistant｜></think>"
    assert text([user("a")], tools=[WEATHER], thinking_mode="chat") == expected
    late = text([user("a"), {"role": "system", "content": "s"}], tools=[WEATHER], thinking_mode="chat")
    assert late.startswith(f"{BOS}<｜System｜>\n\n{TOOLS_SECTION}<｜User｜>a<｜System｜>s")


def test_tools_given_twice_are_refused():
    with pytest.raises(ProtocolError, match="tools: are given in the request and in its first message"):
        encode_chat([{"role": "system", "content": "s", "tools": [WEATHER]}], tools=[WEATHER])


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_a_text_format_renders_nothing(value: object):
    assert text([user("a")], response_format=value) == text([user("a")])


def test_a_json_object_format_asks_for_any_object():
    assert 'schema to reply:\n{"type": "object"}<｜User｜>' in text(
        [user("a")], response_format={"type": "json_object"}
    )


@pytest.mark.parametrize(
    "value",
    ["json", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 1}}],
)
def test_a_malformed_format_is_refused(value: object):
    with pytest.raises(ProtocolError, match="response_format"):
        encode_chat([user("a")], response_format=value)


def test_several_schemas_stand_one_a_line_in_caller_order():
    section = text([user("a")], tools=[MATH, WEATHER], thinking_mode="chat")
    add = '{"name": "add", "parameters": {"type": "object", "properties": {}}}'
    assert f'Schemas\n\n{add}\n{{"name": "get_weather", "description"' in section


def test_schemas_keep_key_order_and_non_ascii_and_gain_no_keys():
    function = {"parameters": {"type": "object"}, "strict": True, "name": "f", "description": "café 二"}
    section = text([user("a")], tools=[{"function": function, "type": "function", "extra": 1}])
    assert (
        '\n\n{"parameters": {"type": "object"}, "strict": true, "name": "f", "description": "café 二"}\n\n' in section
    )


def test_namespaces_are_one_identity_in_schemas_and_history():
    function = MATH["function"]
    variants = [
        {"type": "function", "namespace": "math", "function": function},
        {"type": "function", "namespace": {"name": "math"}, "function": function},
        {"type": "function", "function": {**function, "namespace": "math"}},
        {"type": "function", "function": {**function, "name": "math::add"}},
    ]
    calls = [{**variant, "id": "c", "function": {**variant["function"], "arguments": "{}"}} for variant in variants]
    rendered = {
        text([user("a"), assistant(None, tool_calls=[c])], tools=[t]) for t, c in zip(variants, calls, strict=True)
    }
    assert len(rendered) == 1
    (prompt,) = rendered
    assert '{"name": "math::add", "parameters"' in prompt and 'invoke name="math::add">' in prompt
    assert "namespace" not in prompt


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [
        ({"k": 1}, 'name="k" string="false">1<'),
        ('{"k": 1}', 'name="k" string="false">1<'),
        ('"{\\"k\\": 1}"', 'name="k" string="false">1<'),
        ("[1, 2]", 'name="arguments" string="true">[1, 2]<'),
        ("NaN", 'name="arguments" string="true">NaN<'),
        ([1, 2], 'name="arguments" string="true">[1, 2]<'),
        (None, 'invoke name="f">\n\n<'),
    ],
)
def test_arguments_as_object_text_or_twice_encoded(arguments: object, rendered: str):
    assert rendered in text([user("a"), assistant(None, tool_calls=[call("c", arguments=arguments)])])


def test_unsupported_parts_of_a_tool_result_become_words():
    result = {"role": "tool", "content": [{"type": "text", "text": "t"}, {"type": "audio", "data": 1}]}
    assert "<tool_result>t\n\n[Unsupported audio]</tool_result>" in text([result])


def test_content_blocks_win_over_content():
    blocks = [
        {"type": "tool_result", "tool_use_id": "i", "content": "4C"},
        {"type": "text", "text": "and now?"},
    ]
    message = {"role": "user", "content": "ignored", "content_blocks": blocks}
    assert text([message], thinking_mode="chat").startswith(
        f"{BOS}<｜User｜><tool_result>4C</tool_result>\n\nand now?<｜Assistant｜>"
    )


def test_images_follow_the_rendered_order():
    def image(name: str) -> dict:
        return {"type": "image", "image": name}

    messages = [
        user([image("first"), {"type": "input_text", "text": "t"}]),
        assistant(None, tool_calls=[call("i"), call("j")]),
        {"role": "tool", "tool_call_id": "j", "content": [image("of j")]},
        user([{"type": "input_image", "image": "between"}]),
        {"role": "tool", "tool_call_id": "i", "content": [image("of i"), image("of i too")]},
    ]
    prompt = encode_chat(messages)
    assert [image.part["image"] for image in prompt.images] == ["first", "of i", "of i too", "between", "of j"]
    assert [image.index for image in prompt.images] == [0, 3, 4, 2, 1]
    assert prompt.images[1].param == "messages[4].content[0]"
    assert prompt.segments.count(Segment(IMAGE, True)) == 5


@pytest.mark.parametrize(
    "message",
    [
        user(f"a {IMAGE}"),
        user([{"type": "text", "text": IMAGE}]),
        {"role": "system", "content": IMAGE},
        {"role": "tool", "content": IMAGE},
        {"role": "latest_reminder", "content": IMAGE},
        assistant(IMAGE),
        assistant("a", reasoning_content=IMAGE),
        assistant("a", tool_calls=[call("c", name=IMAGE)]),
        assistant("a", tool_calls=[call("c", arguments={"k": ["x", {"y": IMAGE}]})]),
        assistant("a", tool_calls=[call("c", arguments={IMAGE: 1})]),
        {"role": "user", "content_blocks": [{"type": "tool_result", "content": IMAGE}]},
    ],
)
def test_the_image_placeholder_cannot_be_forged(message: dict):
    with pytest.raises(ProtocolError, match="image placeholder"):
        encode_chat([user("a"), message])


def test_tool_schemas_cannot_forge_images():
    with pytest.raises(ProtocolError, match=r"tools\[0\]\.function: must not contain the image placeholder"):
        encode_chat([user("a")], tools=[{"type": "function", "function": {"name": "f", "description": IMAGE}}])


@pytest.mark.parametrize("cut", [1, 2, 3])  # the two tool messages at the end form one turn
def test_context_renders_only_what_is_new(cut: int):
    messages = WORKED_PROMPTS["P10"].messages
    earlier, new = messages[:cut], messages[cut:]
    assert text(earlier) + text(new, context=earlier) == text(messages)


def test_context_decides_dropping_and_sorting():
    calls = [call("i"), call("j")]
    earlier = [{"role": "system", "content": "", "tools": [WEATHER]}, user("a"), assistant("", tool_calls=calls)]
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "ji"]
    new = [*results, assistant("b", reasoning_content="why"), user("c")]
    rendered = text(new, context=earlier)
    assert rendered.startswith(
        "<｜User｜><tool_result>i</tool_result>\n\n<tool_result>j</tool_result><｜Assistant｜><think>"
    )
    assert "why</think>b" in rendered


def test_results_of_unknown_calls_sort_as_the_first():
    messages = [user("a"), assistant("", tool_calls=[call("i"), call("j")])]
    messages += [{"role": "tool", "tool_call_id": name, "content": name} for name in ("j", "x", "i", "y")]
    blocks = "\n\n".join(f"<tool_result>{name}</tool_result>" for name in "xiyj")
    assert blocks in text(messages)


def test_sorting_uses_the_latest_turn_that_listed_calls():
    messages = [
        assistant("", tool_calls=[call("i"), call("j")]),
        user("u"),
        assistant("", tool_calls=[call("j"), call("i")]),
        assistant("no calls"),
        {"role": "tool", "tool_call_id": "i", "content": "i"},
        {"role": "tool", "tool_call_id": "j", "content": "j"},
    ]
    assert "<tool_result>j</tool_result>\n\n<tool_result>i</tool_result>" in text(messages)


@pytest.mark.parametrize(
    ("messages", "arguments", "reasoning", "expects"),
    [
        ([user("a")], {}, True, True),
        ([user("a")], {"thinking_mode": "chat"}, False, True),
        ([user("a"), assistant("b")], {}, False, False),
        ([user("a"), assistant("b", wo_eos=True)], {}, False, True),
        ([{**user("a"), "task": "title"}], {}, False, True),
        ([{**user("a"), "task": "action"}], {}, True, True),
    ],
)
def test_the_prompt_says_how_the_reply_starts(messages, arguments, reasoning, expects):
    prompt = encode_chat(messages, **arguments)
    assert (prompt.starts_in_reasoning, prompt.expects_reply) == (reasoning, expects)


def test_an_open_turn_in_the_middle_stays_open():
    messages = [user("a"), assistant("b", wo_eos=True), user("c")]
    assert (
        text(messages, thinking_mode="chat")
        == f"{BOS}<｜User｜>a<｜Assistant｜></think>b<｜User｜>c<｜Assistant｜></think>"
    )
    assert encode_chat(messages).open_reply is None
