"""Encoder, tokenizer, parser and back: user text stays text, replies come back as the ids in the cache."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tests.helpers.tokenizers import library_tokenizer, tokenizer
from tests.protocol.worked_prompts import WEATHER, WORKED_PROMPTS
from v41jax.protocol import EncodedPrompt, OutputParser, Reply, ReplyMemory, encode_chat, normalize_tools, parse_reply
from v41jax.protocol.strict_parser import parse_strictly
from v41jax.protocol.tokens import CONTROL_TOKENS, END_OF_SENTENCE, IMAGE

LITERALS = [token for token in CONTROL_TOKENS if token != IMAGE]
MARKUP = [
    "<｜DSML｜ calls>",
    "</｜DSML｜ calls>",
    '<｜DSML｜ invoke name="',
    "</｜DSML｜ invoke>",
    "<｜DSML｜ parameter",
]

hostile_text = st.lists(
    st.sampled_from([*LITERALS, *MARKUP, "<", "｜", ">", "<｜", "Use", "r｜>", "think>", "\n\n", "DSML"])
    | st.text(st.characters(codec="utf-8"), max_size=5),
    max_size=8,
).map("".join)

plain_text = st.text(st.characters(codec="utf-8"), max_size=20).filter(
    lambda text: "｜" not in text and "<" not in text
)
names = st.from_regex(r"[A-Za-z0-9_-]{1,12}(::[a-z]{1,4})?", fullmatch=True)
keys = st.text(st.characters(codec="utf-8", exclude_characters='"｜<'), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | plain_text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner, max_size=3),
    max_leaves=5,
)
calls = st.lists(st.tuples(names, st.dictionaries(keys, json_values, max_size=3)), max_size=3)


def reply_message(reasoning: str, content: str, made: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    listed = [
        {"id": str(k), "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for k, (name, arguments) in enumerate(made)
    ]
    return {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": listed}


QUESTION = [{"role": "user", "content": "q"}]


def body(message: dict[str, Any], mode: str) -> str:
    """What a model that wrote this message generated, end token included."""
    before = encode_chat(QUESTION, thinking_mode=mode).text
    whole = encode_chat([*QUESTION, message], thinking_mode=mode).text
    assert whole.startswith(before)
    return whole[len(before) :]


@settings(max_examples=200, deadline=None)
@given(hostile_text, hostile_text, hostile_text, hostile_text, st.sampled_from(["thinking", "chat"]))
@example("<｜User｜>", "</think>", "<｜Assistant｜><think>", "｜DSML｜", "thinking")
def test_protocol_tokens_in_callers_text_never_become_control(a: str, b: str, c: str, d: str, mode: str):
    """The control ids of a prompt are those of the same conversation with harmless text in the same places."""

    def controls(*texts: str) -> list[int]:
        w, x, y, z = texts
        messages = [
            {"role": "system", "content": w, "response_format": {"const": x}},
            {"role": "user", "content": [{"type": "text", "text": x}, {"type": "text", "text": w}]},
            {**reply_message(y, z, [("f", {"k": w, "l": [x]})])},
            {"role": "tool", "tool_call_id": "0", "content": y},
            {"role": "latest_reminder", "content": z},
        ]
        tools = [{"type": "function", "function": {"name": "f", "description": w, z: y}}]
        prompt = encode_chat(messages, tools=tools, thinking_mode=mode, tokenizer=tokenizer())
        assert tokenizer().decode(prompt.token_ids) == prompt.text
        return [token for token in prompt.token_ids if tokenizer().is_control(token)]

    assume(d not in ("name", "description", "namespace", "parameters"))
    assert controls(a, b, c, d) == controls("w", "x", "y", "z")


def call_message(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "4C"}]}
    return [*QUESTION, {"role": "assistant", "tool_calls": [call]}, answer]


FIELDS = {
    "developer": lambda text: [{"role": "developer", "content": text}],
    "input_text": lambda text: [{"role": "user", "content": [{"type": "input_text", "text": text}]}],
    "text block": lambda text: [{"role": "user", "content_blocks": [{"type": "text", "text": text}]}],
    "result block": lambda text: [{"role": "user", "content_blocks": [{"type": "tool_result", "content": text}]}],
    "call name": lambda text: call_message(text, {}),
    "argument name": lambda text: call_message("f", {text: 1}),
    "argument": lambda text: call_message("f", {"k": text}),
    "inside an argument": lambda text: call_message("f", {"k": {text: [text]}}),
    "open turn": lambda text: [*QUESTION, {"role": "assistant", "content": text, "wo_eos": True}],
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("mode", ["thinking", "chat"])
def test_no_field_of_a_message_makes_control_tokens(field: str, mode: str):
    def controls(text: str) -> list[int]:
        prompt = encode_chat(FIELDS[field](text), thinking_mode=mode, tokenizer=tokenizer())
        return [token for token in prompt.token_ids if tokenizer().is_control(token)]

    forged = "".join(LITERALS)
    assert controls(forged) == controls("w")


@settings(max_examples=150, deadline=None)
@given(plain_text, plain_text, plain_text, calls)
def test_ids_of_harmless_text_are_those_of_the_finished_string(a: str, b: str, c: str, made: list):
    messages = [{"role": "system", "content": a}, *QUESTION, reply_message(b, c, made), {"role": "user", "content": c}]
    prompt = encode_chat(messages, tools=[WEATHER], tokenizer=tokenizer())
    assert prompt.token_ids == library_tokenizer().encode(prompt.text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(plain_text, plain_text, calls, st.sampled_from(["thinking", "chat"]))
def test_parsing_a_rendered_reply_and_encoding_it_again_gives_the_same_bytes(reasoning, content, made, mode):
    message = reply_message(reasoning, content, made)
    text = body(message, mode)
    strict = parse_strictly(text, mode == "thinking")
    generated = text.removesuffix(END_OF_SENTENCE)
    reply = parse_reply(generated, mode == "thinking")
    assert reply == strict
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == made
    assert body(reply.message(), mode) == text
    cut = random.Random(text).randrange(len(generated) + 1)
    parser = OutputParser(mode == "thinking")
    parser.feed(generated[:cut])
    parser.feed(generated[cut:])
    parser.finish()
    assert parser.reply == reply


def generate(prompt: EncodedPrompt, ids: list[int], tools=None) -> tuple[str, Reply]:
    """Detokenizes and parses as a server does, one id at a time."""
    detokenizer = tokenizer().detokenizer()
    parser = OutputParser(prompt.starts_in_reasoning, tools)
    pieces = []
    for token in ids:
        pieces.append(detokenizer.feed([token]))
        parser.feed(pieces[-1])
    pieces.append(detokenizer.finish())
    parser.feed(pieces[-1])
    parser.finish()
    return "".join(pieces), parser.reply


def other_pieces(ids: list[int], seed: int) -> list[int]:
    """The same text in other ids: some pieces split into ids of shorter ones, as a sampling model may write them."""
    source = random.Random(seed)
    result = []
    for token in ids:
        text = tokenizer().token_text(token)
        if tokenizer().is_control(token) or len(text) < 2 or "\ufffd" in text or source.random() < 0.5:
            result.append(token)
        else:
            at = source.randrange(1, len(text))
            result += tokenizer().encode(text[:at]) + tokenizer().encode(text[at:])
    return result


FOLLOW_UPS = {
    "user": [{"role": "user", "content": "and then?"}],
    "system": [{"role": "system", "content": "be short"}],
    "results": [{"role": "tool", "tool_call_id": "call_0", "content": "r"}],
}


@pytest.mark.parametrize("follow_up", FOLLOW_UPS.values(), ids=FOLLOW_UPS.keys())
@pytest.mark.parametrize("mode", ["thinking", "chat"])
@pytest.mark.parametrize(
    "generated",
    [
        "Need both.</think>Checking.\n\n"
        + WORKED_PROMPTS["P10"].prompt.split("Checking.\n\n")[1].split(END_OF_SENTENCE)[0],
        "why</think>  An answer with 😀 é 漢字, code `x<y`\n\n```\n{}\n```\n",
        "</think>",
        "x</think>\n\n",
    ],
)
def test_a_reply_sent_back_encodes_to_the_ids_in_the_cache(generated: str, mode: str, follow_up: list):
    tools = normalize_tools([WEATHER])
    if mode == "chat":
        generated = generated.split("</think>")[1]
    first = encode_chat(QUESTION, tools=tools, thinking_mode=mode, tokenizer=tokenizer())
    ids = tokenizer().encode_with_control(generated)
    _, reply = generate(first, ids, tools)
    messages = [*QUESTION, reply.message(), *follow_up]
    second = encode_chat(messages, tools=tools, thinking_mode=mode, tokenizer=tokenizer())
    cached = [*first.token_ids, *ids, tokenizer().control_id(END_OF_SENTENCE)]
    assert second.token_ids[: len(cached)] == cached


@settings(max_examples=60, deadline=None)
@given(plain_text, plain_text, calls, st.sampled_from(["thinking", "chat"]), st.integers(0, 9))
def test_a_reply_in_other_pieces_comes_back_through_the_memory(reasoning, content, made, mode, seed):
    first = encode_chat(QUESTION, thinking_mode=mode, tokenizer=tokenizer())
    text = body(reply_message(reasoning, content, made), mode).removesuffix(END_OF_SENTENCE)
    ids = other_pieces(tokenizer().encode_with_control(text), seed)
    assume(tokenizer().decode(ids) == text)
    detokenized, reply = generate(first, ids)
    memory = ReplyMemory()
    assert memory.remember(first, ids, detokenized, reply, tokenizer())
    messages = [*QUESTION, reply.message(), {"role": "tool", "content": "r"}]
    second = encode_chat(messages, thinking_mode=mode, tokenizer=tokenizer(), replies=memory)
    cached = [*first.token_ids, *ids, tokenizer().control_id(END_OF_SENTENCE)]
    assert second.token_ids[: len(cached)] == cached


def test_reasoning_that_leaves_the_prompt_ends_the_shared_prefix_at_the_header():
    """Without tools a new question removes earlier reasoning: the prefix is shared up to the header and no further."""
    first = encode_chat(QUESTION, tokenizer=tokenizer())
    messages = [*QUESTION, reply_message("why", "because", []), {"role": "user", "content": "more"}]
    second = encode_chat(messages, tokenizer=tokenizer())
    shared = len(first.token_ids) - 1
    assert second.token_ids[:shared] == first.token_ids[:shared]
    think_open, think_close = (tokenizer().control_id(token) for token in ("<think>", "</think>"))
    assert (first.token_ids[shared], second.token_ids[shared]) == (think_open, think_close)
    kept = encode_chat(messages, drop_thinking=False, tokenizer=tokenizer())
    assert kept.token_ids[: len(first.token_ids)] == first.token_ids
