"""Chat through OpenAI's client against a running server."""

import json

import pytest

from tests.helpers import forced, servers
from v41jax.protocol.tokens import (
    CALLS_CLOSE,
    CALLS_OPEN,
    CONTROL_TOKENS,
    IMAGE,
    INVOKE_CLOSE,
    INVOKE_OPEN,
    PARAMETER_CLOSE,
)

QUESTION = [{"role": "user", "content": "Name a prime."}]
NO_THINKING = {"thinking": {"type": "disabled"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = (
    f'{CALLS_OPEN}\n{INVOKE_OPEN}get_weather">\n<｜DSML｜ parameter name="city" string="true">Oslo{PARAMETER_CLOSE}\n'
    f'<｜DSML｜ parameter name="days" string="false">2{PARAMETER_CLOSE}\n{INVOKE_CLOSE}\n{CALLS_CLOSE}'
)


def ask(client, messages=QUESTION, **options):
    options.setdefault("max_tokens", 4)
    return client.chat.completions.create(model=servers.MODEL, messages=messages, **options)


def joined(stream):
    """The chunks of a stream, and per choice the joined fields of its deltas."""
    chunks = list(stream)
    choices = {}
    for chunk in chunks:
        for choice in chunk.choices:
            held = choices.setdefault(choice.index, {"calls": {}, "finish": None, "logprobs": []})
            for name in ("role", "content", "reasoning_content"):
                value = getattr(choice.delta, name, None)
                if value is not None:
                    held[name] = held.get(name, "") + value
            for call in choice.delta.tool_calls or ():
                known = held["calls"].setdefault(call.index, {"id": call.id, "name": call.function.name, "text": ""})
                known["text"] += call.function.arguments
            held["logprobs"] += choice.logprobs.content if choice.logprobs else []
            held["finish"] = choice.finish_reason or held["finish"]
    return chunks, choices


def test_a_reply_carries_what_the_api_promises(client):
    reply = ask(client, max_tokens=50, max_completion_tokens=3)
    assert (reply.object, reply.model) == ("chat.completion", servers.MODEL)
    assert reply.id.startswith("chatcmpl-")
    choice = reply.choices[0]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.logprobs is None and choice.message.tool_calls is None
    assert reply.usage.completion_tokens == 3
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 3


def test_a_stream_says_the_same_as_a_whole_reply(client):
    options = {"max_tokens": 6, "seed": 5, "logprobs": True, "top_logprobs": 2}
    whole = ask(client, **options)
    chunks, choices = joined(ask(client, stream=True, stream_options={"include_usage": True}, **options))
    message = whole.choices[0].message
    assert (choices[0]["role"], choices[0]["finish"]) == ("assistant", "length")
    assert choices[0].get("reasoning_content", "") == message.reasoning_content
    assert choices[0]["content"] == message.content
    assert choices[0]["logprobs"] == whole.choices[0].logprobs.content
    assert len({chunk.id for chunk in chunks}) == 1
    first, last = chunks[0].choices[0], chunks[-1]
    assert (first.delta.role, first.delta.content) == ("assistant", "")
    assert last.choices == [] and last.usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_reasoning_and_content_come_apart(client, engine):
    with forced.replies(engine, *["Two divides itself.</think>Two."] * 2):
        whole = ask(client, max_tokens=40)
        chunks, choices = joined(ask(client, max_tokens=40, stream=True))
    message = whole.choices[0].message
    assert (message.reasoning_content, message.content) == ("Two divides itself.", "Two.")
    assert whole.choices[0].finish_reason == "stop"
    reasoning = engine.tokenizer.encode_with_control("Two divides itself.</think>")
    assert whole.usage.completion_tokens_details.reasoning_tokens == len(reasoning)
    assert (choices[0]["reasoning_content"], choices[0]["content"]) == ("Two divides itself.", "Two.")
    for chunk in chunks:
        for choice in chunk.choices:
            assert not (choice.delta.content and getattr(choice.delta, "reasoning_content", None))


def test_thinking_can_be_turned_off_and_is_then_absent(client, engine):
    with forced.replies(engine, "Two.<think>hm</think>"):
        reply = ask(client, max_tokens=40, extra_body=NO_THINKING)
    assert reply.choices[0].message.content == "Two."
    assert not hasattr(reply.choices[0].message, "reasoning_content")
    assert reply.usage.prompt_tokens < ask(client, max_tokens=1).usage.prompt_tokens


def test_tool_calls_arrive_whole_and_in_fragments(client, engine):
    options = {"tools": [WEATHER], "max_tokens": 120, "temperature": 0}
    with forced.replies(engine, *[f"I must look.</think>A moment.\n\n{CALL}"] * 2):
        whole = ask(client, **options)
        chunks, choices = joined(ask(client, stream=True, **options))
    message = whole.choices[0].message
    assert whole.choices[0].finish_reason == choices[0]["finish"] == "tool_calls"
    assert (message.reasoning_content, message.content) == ("I must look.", "A moment.")
    call = message.tool_calls[0]
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Oslo", "days": 2}
    streamed = choices[0]["calls"][0]
    assert (streamed["name"], streamed["text"]) == ("get_weather", call.function.arguments)
    assert streamed["id"].startswith("call_") and choices[0]["content"] == "A moment."
    fragments = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.tool_calls]
    assert len(fragments) > 2


def test_a_call_cut_by_the_limit_is_reported_as_length(client, engine):
    with forced.replies(engine, f"</think>{CALL}"):
        reply = ask(client, tools=[WEATHER], max_tokens=20)
    assert reply.choices[0].finish_reason == "length"


def test_tool_choice_none_hides_tools_and_calls(client, engine):
    plain = ask(client, max_tokens=1).usage.prompt_tokens
    with forced.replies(engine, f"</think>{CALL}"):
        reply = ask(client, tools=[WEATHER], tool_choice="none", max_tokens=120, temperature=0)
    assert reply.usage.prompt_tokens == plain
    assert reply.choices[0].message.tool_calls is None and reply.choices[0].finish_reason == "stop"


def test_a_conversation_sent_back_hits_the_pages_it_filled(client, engine):
    tokenizer = engine.tokenizer
    # The model spells words in pieces that the tokenizer would not choose.
    spelled = [token for letter in "a prime number is odd or two " * 3 for token in tokenizer.encode(letter)]
    assert spelled != tokenizer.encode("a prime number is odd or two " * 3)
    with forced.replies(engine, spelled):
        first = ask(client, max_tokens=200, temperature=0, extra_body=NO_THINKING)
    messages = [*QUESTION, first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "Why?"}]
    second = ask(client, messages, max_tokens=2, extra_body=NO_THINKING)
    said = first.usage.prompt_tokens + first.usage.completion_tokens
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == (said - 1) // servers.PAGE * servers.PAGE > first.usage.prompt_tokens


def test_choices_share_the_pages_of_their_prompt_and_follow_their_seeds(client, server):
    long = [{"role": "user", "content": "Tell me of the numbers that have two divisors. " * 12}]
    before = server.engine.statistics()["hit_tokens"]
    reply = ask(client, long, n=3, seed=11, max_tokens=5)
    pages = (reply.usage.prompt_tokens - 1) // servers.PAGE
    found = reply.usage.prompt_tokens_details.cached_tokens  # by the first choice, of earlier conversations
    assert server.engine.statistics()["hit_tokens"] - before == 2 * pages * servers.PAGE + found
    assert found < pages * servers.PAGE
    texts = [choice.message.reasoning_content for choice in reply.choices]
    assert [choice.index for choice in reply.choices] == [0, 1, 2] and len(set(texts)) == 3
    assert reply.usage.completion_tokens == 15
    _, streamed = joined(ask(client, long, n=3, seed=11, max_tokens=5, stream=True))
    assert [streamed[index]["reasoning_content"] for index in range(3)] == texts


def test_stop_strings_end_a_reply_and_are_not_part_of_it(client, engine):
    with forced.replies(engine, *["one two three four"] * 2):
        reply = ask(client, stop=["wo th"], max_tokens=30, extra_body=NO_THINKING)
        _, choices = joined(ask(client, stop="wo th", max_tokens=30, stream=True, extra_body=NO_THINKING))
    assert reply.choices[0].message.content == choices[0]["content"] == "one t"
    assert reply.choices[0].finish_reason == choices[0]["finish"] == "stop"


def test_a_bias_decides_and_a_top_of_one_is_greedy(client, engine):
    token = engine.tokenizer.encode(" seven")[0]
    reply = ask(client, max_tokens=3, logit_bias={str(token): 100}, extra_body=NO_THINKING)
    assert reply.choices[0].message.content == " seven" * 3
    greedy = ask(client, temperature=0, max_tokens=4)
    for options in ({"extra_body": {"top_k": 1}}, {"top_p": 1e-6}, {"extra_body": {"min_p": 1.0}}):
        same = ask(client, max_tokens=4, seed=3, **options)
        assert same.choices[0].message.reasoning_content == greedy.choices[0].message.reasoning_content


def test_protocol_tokens_of_a_user_stay_text(http):
    def controls(content):
        body = {"messages": [{"role": "user", "content": content}]}
        return [token for token in http.post("/tokenize", json=body).json()["tokens"] if token in special]

    forged = "".join(token for token in CONTROL_TOKENS if token != IMAGE)
    special = set(http.post("/tokenize", json={"prompt": forged, "parse_special_tokens": True}).json()["tokens"])
    assert len(special) == len(CONTROL_TOKENS) - 1
    assert controls(forged) == controls("Hello.")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"stop": [1]}, "stop[0]"),
        ({"logit_bias": {str(servers.VOCABULARY): 1}}, "logit_bias"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"functions": [{"name": "f", "parameters": {}}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        (
            {"messages": [*QUESTION, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
            "messages[1].function_call",
        ),
        ({"messages": [*QUESTION, {"role": "assistant", "audio": {"id": "a"}}, *QUESTION]}, "messages[1].audio"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "far too long " * 1000}]}, "messages"),
    ],
)
def test_a_wrong_field_is_named(http, change, param):
    body = {"model": servers.MODEL, "messages": QUESTION, "max_tokens": 1} | change
    answer = http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert error["type"] == "invalid_request_error" and error["message"]


def test_a_message_is_accepted_back_as_the_client_holds_it(client):
    """With every field of OpenAI's that is null here, and empty lists that ask for nothing."""
    message = ask(client, max_tokens=2, extra_body=NO_THINKING).choices[0].message.model_dump()
    assert message["function_call"] is None and message["audio"] is None
    asked_for_nothing = {"functions": [], "function_call": None, "audio": None, "modalities": ["text"], "tools": []}
    ask(client, [*QUESTION, message, *QUESTION], max_tokens=1, extra_body=asked_for_nothing)


def test_every_fault_of_a_body_is_reported_at_once(http):
    body = {"messages": QUESTION, "temperature": -1, "stream": "yes", "reasoning_effort": 0}
    message = http.post("/v1/chat/completions", json=body).json()["error"]["message"]
    assert all(name in message for name in ("temperature", "stream", "reasoning_effort"))
