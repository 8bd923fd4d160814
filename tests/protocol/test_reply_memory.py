"""What the reply memory keeps, refuses, and forgets."""

from __future__ import annotations

import pytest

from tests.helpers.tokenizers import tokenizer
from v41jax.protocol import ReplyMemory, encode_chat, parse_reply
from v41jax.protocol.tokens import END_OF_SENTENCE

QUESTION = [{"role": "user", "content": "q"}]


def spelled(text: str) -> list[int]:
    """One id a character: hardly ever what the tokenizer would write."""
    return [token for character in text for token in tokenizer().encode(character)]


def remember(
    memory: ReplyMemory, ids: list[int], messages=QUESTION, mode: str = "chat", text: str | None = None
) -> bool:
    prompt = encode_chat(messages, thinking_mode=mode, tokenizer=tokenizer(), replies=memory)
    text = tokenizer().decode(ids) if text is None else text
    return memory.remember(prompt, ids, text, parse_reply(text, prompt.starts_in_reasoning), tokenizer())


def ids_after(memory: ReplyMemory, message: dict, mode: str = "chat") -> list[int]:
    """Ids of the message's body in a conversation that continues."""
    messages = [*QUESTION, message, {"role": "tool", "content": "r"}]
    prompt = encode_chat(messages, thinking_mode=mode, tokenizer=tokenizer(), replies=memory)
    before = encode_chat(QUESTION, thinking_mode=mode, tokenizer=tokenizer()).token_ids
    rest = prompt.token_ids[len(before) :]
    return rest[: rest.index(tokenizer().control_id(END_OF_SENTENCE))]


def test_a_canonical_reply_takes_no_memory():
    memory = ReplyMemory()
    assert remember(memory, tokenizer().encode("hello world"))
    assert len(memory) == 0


def test_a_reply_is_recalled_for_its_own_text_only():
    memory = ReplyMemory()
    ids = spelled("hello world")
    assert remember(memory, ids) and len(memory) == 1
    assert ids_after(memory, {"role": "assistant", "content": "hello world"}) == ids
    assert ids_after(memory, {"role": "assistant", "content": "hello worlds"}) == tokenizer().encode("hello worlds")
    assert ids_after(ReplyMemory(), {"role": "assistant", "content": "hello world"}) == tokenizer().encode(
        "hello world"
    )


def test_the_newest_reply_with_a_text_counts():
    memory = ReplyMemory()
    message = {"role": "assistant", "content": "hello world"}
    for ids in (spelled("hello world"), tokenizer().encode("hello world"), spelled("hello") + spelled(" world")):
        assert remember(memory, ids)
        assert ids_after(memory, message) == ids


def test_a_reply_is_recalled_in_its_own_conversation_only():
    """Another client's conversation must not depend on how a model once cut the same words."""
    memory = ReplyMemory()
    assert remember(memory, spelled("hello world"))
    reply = {"role": "assistant", "content": "hello world"}
    for messages in ([{"role": "user", "content": "other"}, reply], [*QUESTION, reply, *QUESTION, reply]):
        prompt = encode_chat(messages, thinking_mode="chat", tokenizer=tokenizer(), replies=memory)
        assert prompt.token_ids[-2 - len(tokenizer().encode("hello world")) + 1 : -1] == tokenizer().encode(
            "hello world"
        )


def test_replies_of_one_conversation_build_on_each_other():
    memory = ReplyMemory()
    messages = [*QUESTION]
    cached: list[int] = []
    for turn in range(4):
        prompt = encode_chat(messages, thinking_mode="chat", tokenizer=tokenizer(), replies=memory)
        assert prompt.token_ids[: len(cached)] == cached
        ids = spelled("hello world")
        assert remember(memory, ids, messages)
        cached = [*prompt.token_ids, *ids, tokenizer().control_id(END_OF_SENTENCE)]
        messages += [{"role": "assistant", "content": "hello world"}, {"role": "user", "content": f"go on {turn}"}]
    assert len(memory) == 4


def test_a_prompt_without_ids_cannot_be_remembered_for():
    with pytest.raises(ValueError, match="give encode_chat a tokenizer"):
        ReplyMemory().remember(encode_chat(QUESTION), [], "", parse_reply("", True), tokenizer())


def test_calls_without_blank_line_and_with_dense_json_come_back_as_written():
    memory = ReplyMemory()
    text = (
        'Look:<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n'
        '<｜DSML｜ parameter name="a" string="false">[1,2]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )
    ids = tokenizer().encode_with_control(text)
    assert remember(memory, ids) and len(memory) == 1
    assert ids_after(memory, parse_reply(text, False).message()) == ids


def test_reasoning_is_part_of_what_is_recalled():
    memory = ReplyMemory()
    ids = [*spelled("think"), tokenizer().control_id("</think>"), *spelled("hello")]
    assert remember(memory, ids, mode="thinking")
    message = {"role": "assistant", "reasoning_content": "think", "content": "hello"}
    assert ids_after(memory, message, "thinking") == ids
    assert ids_after(memory, {**message, "reasoning_content": "other"}, "thinking") != ids
    assert ids_after(memory, message, "chat") == tokenizer().encode("hello")


def test_a_continued_turn_is_recalled_whole():
    memory = ReplyMemory()
    opened = [*QUESTION, {"role": "assistant", "content": "Hel", "wo_eos": True}]
    assert remember(memory, tokenizer().encode("lo"), opened)
    assert ids_after(memory, {"role": "assistant", "content": "Hello"}) == [
        *tokenizer().encode("Hel"),
        *tokenizer().encode("lo"),
    ]


@pytest.mark.parametrize(
    "opened",
    [
        {"content": [{"type": "image"}, {"type": "text", "text": "x"}]},
        {"content": "x", "tool_calls": [{"function": {"name": "f"}}]},
    ],
)
def test_an_open_turn_that_cannot_come_back_in_one_piece_is_not_kept(opened: dict):
    memory = ReplyMemory()
    assert not remember(memory, spelled("hello"), [*QUESTION, {"role": "assistant", "wo_eos": True, **opened}])
    assert len(memory) == 0


def test_a_turn_that_continues_text_is_not_kept():
    """After an open assistant turn the ids of the next one depend on what came before."""
    opened = {"role": "assistant", "content": "x", "wo_eos": True}
    memory = ReplyMemory()
    assert not remember(memory, spelled("hello"), [*QUESTION, opened, opened])


def test_text_cut_by_a_stop_string_is_not_kept():
    memory = ReplyMemory()
    assert not remember(memory, spelled("hello world"), text="hello")
    assert len(memory) == 0


def test_half_a_call_is_not_kept():
    memory = ReplyMemory()
    text = '<｜DSML｜ calls>\n<｜DSML｜ invoke name="f">\n<｜DSML｜ parameter name="a" string="true">hal'
    assert not remember(memory, tokenizer().encode_with_control(text))


def test_unclosed_reasoning_is_not_kept():
    assert not remember(ReplyMemory(), spelled("thinking and thinking"), mode="thinking")


@pytest.mark.parametrize("token", ["<｜User｜>", "<｜System｜>", "<｜deepseek_image｜>", "<｜Assistant｜>"])
def test_control_tokens_of_other_turns_are_not_kept(token: str):
    """A client must not bring back as control what it can only send as text."""
    ids = [*spelled("ab"), tokenizer().control_id(token)]
    assert not remember(ReplyMemory(), ids)


def test_the_least_recently_used_replies_go_first():
    memory = ReplyMemory(max_tokens=30)
    words = ["first one.", "second one", "third one."]
    for word in words[:2]:
        assert remember(memory, spelled(word))
    assert ids_after(memory, {"role": "assistant", "content": words[0]}) == spelled(words[0])
    assert remember(memory, spelled(words[2]) + spelled("!"))
    kept = [
        ids_after(memory, {"role": "assistant", "content": w}) == spelled(w)
        for w in (words[0], words[1], "third one.!")
    ]
    assert kept == [True, False, True]


def test_a_reply_larger_than_the_memory_is_forgotten_at_once():
    memory = ReplyMemory(max_tokens=5)
    remember(memory, spelled("hello world"))
    assert len(memory) == 0


def test_the_same_reply_twice_counts_once():
    memory = ReplyMemory(max_tokens=25)
    for _ in range(5):
        remember(memory, spelled("hello world"))
    remember(memory, spelled("hello there"))
    assert len(memory) == 2
