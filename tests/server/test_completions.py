"""Raw completions through OpenAI's client, and scoring as evaluation harnesses do it."""

import dataclasses
import json

import numpy as np
import openai
import pytest

from tests.helpers import forced, servers
from v41jax.server.logprobs import token_label

TEXT = "Once upon a time there was a"


def complete(client, prompt=TEXT, **options):
    options.setdefault("max_tokens", 4)
    return client.completions.create(model=servers.MODEL, prompt=prompt, **options)


def test_text_and_ids_are_the_same_prompt(client, engine):
    ids = [0, *engine.tokenizer.encode(TEXT)]
    answers = [complete(client, prompt, temperature=0) for prompt in (TEXT, ids)]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].usage.prompt_tokens == len(ids)
    assert (answers[0].object, answers[0].choices[0].finish_reason) == ("text_completion", "length")


def test_several_prompts_with_several_choices_keep_their_order(client):
    prompts = [TEXT, "Another tale"]
    both = complete(client, prompts, n=2, seed=4, echo=True)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(both.choices):
        assert choice.text.startswith(prompts[index // 2])
    alone = complete(client, prompts[1], n=2, seed=4, echo=True)
    assert [choice.text for choice in alone.choices] == [choice.text for choice in both.choices[2:]]


def test_a_stream_joins_to_the_whole(client):
    options = {"seed": 9, "logprobs": 2, "echo": True, "max_tokens": 5}
    whole = complete(client, **options)
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}, **options))
    pieces = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(piece.text for piece in pieces) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        listed = [entry for piece in pieces if piece.logprobs for entry in getattr(piece.logprobs, name)]
        assert listed == getattr(whole.choices[0].logprobs, name)
    assert pieces[-1].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == 5


def test_offsets_place_every_token_in_the_text(client):
    choice = complete(client, TEXT + " žluťoučký 🙂 kůň", echo=True, logprobs=1, temperature=0).choices[0]
    ends = [*choice.logprobs.text_offset[1:], len(choice.text)]
    for token, start, end in zip(choice.logprobs.tokens, choice.logprobs.text_offset, ends):
        assert token.startswith("bytes:") or choice.text[start:end] == token


def test_a_broken_character_belongs_to_no_later_token(client, engine):
    """Half a character and then a word: the word's offset is its own, whatever stands for the half."""
    half = next(token for token in range(3, 300) if engine.tokenizer.token_bytes(token) == b"\xc3")
    word = engine.tokenizer.encode(" one")[0]
    choice = complete(client, [5, half, word], echo=True, logprobs=0, max_tokens=0).choices[0]
    assert choice.text[choice.logprobs.text_offset[2] :] == " one" and "\ufffd" in choice.text


def test_a_prompt_scores_as_it_was_generated(client, engine):
    ids = [0, *engine.tokenizer.encode("The whole of arithmetic. " * 20)]
    made = complete(client, ids, temperature=0, logprobs=3, max_tokens=6, extra_body={"skip_special_tokens": False})
    text = made.choices[0].logprobs
    assert len(text.tokens) == 6
    again = complete(client, ids, temperature=0, max_tokens=6, logprobs=3).choices[0].logprobs
    assert again.tokens == text.tokens
    np.testing.assert_allclose(again.token_logprobs, text.token_logprobs, atol=1e-4)
    # Score the continuation as part of a prompt: same log-probabilities, and greedy means it was the best.
    generated = [next(iter(_ids(engine, token))) for token in text.tokens]
    scored = complete(client, [*ids, *generated], echo=True, logprobs=3, max_tokens=0).choices[0]
    assert scored.logprobs.token_logprobs[0] is None
    assert len(scored.logprobs.tokens) == len(ids) + 6
    np.testing.assert_allclose(scored.logprobs.token_logprobs[len(ids) :], text.token_logprobs, atol=1e-3)
    for token, top in zip(scored.logprobs.tokens[len(ids) :], scored.logprobs.top_logprobs[len(ids) :]):
        assert max(top, key=top.get) == token
        assert sum(np.exp(list(top.values()))) <= 1


def _ids(engine, label):
    """Ids whose label is this one."""
    for token in range(engine.tokenizer.vocab_size):
        if token_label(engine.tokenizer, token) == label:
            yield token


def test_penalties_choose_what_the_scores_say(client, engine):
    """Greedy among three tokens, each step recomputed from log-probabilities of the plain model."""
    prompt = [0, *engine.tokenizer.encode(TEXT)]
    words = [engine.tokenizer.encode(word)[0] for word in (" one", " two", " red")]
    biases = {str(words[0]): 60.0, str(words[1]): 60.5, str(words[2]): 59.0}
    options = {"presence_penalty": 1.5, "frequency_penalty": 0.7}
    made = complete(client, prompt, temperature=0, max_tokens=8, logit_bias=biases, logprobs=0, **options)
    chosen = [engine.tokenizer.encode(label)[0] for label in made.choices[0].logprobs.tokens]
    assert set(chosen) <= set(words) and len(set(chosen)) > 1
    steps = [0, 1, 2, 5, 7]
    prompts = [[*prompt, *chosen[:step], word] for step in steps for word in words]
    scored = complete(client, prompts, echo=True, logprobs=0, max_tokens=0)
    scores = np.array([choice.logprobs.token_logprobs[-1] for choice in scored.choices]).reshape(-1, 3)
    for step, plain in zip(steps, scores):
        counts = np.array([chosen[:step].count(word) for word in words])
        values = plain + np.array(list(biases.values())) - 0.7 * counts - 1.5 * (counts > 0)
        assert words[int(values.argmax())] == chosen[step]


def test_scoring_needs_an_engine_that_computes_every_row(client, engine, monkeypatch):
    replaying = dataclasses.replace(engine.config, prompt_logprobs=False, decoder_swa_bounded_replay=True)
    monkeypatch.setattr(engine, "config", replaying)
    with pytest.raises(openai.BadRequestError, match="--no-decoder-swa-bounded-replay"):
        complete(client, echo=True, logprobs=1)
    assert complete(client, echo=True).choices[0].text.startswith(TEXT)


def test_every_generated_token_has_an_entry_also_the_end(client, engine):
    """Harnesses drop the last entry as the one generated token, whatever it was."""
    ids = [5, 6, 7, 8]
    with forced.replies(engine, []):
        choice = complete(client, ids, echo=True, logprobs=1, max_tokens=1).choices[0]
    assert len(choice.logprobs.token_logprobs) == len(ids) + 1
    assert choice.logprobs.tokens[-1] == "<｜end▁of▁sentence｜>"


def test_stop_ids_end_without_their_text(client, engine):
    word = engine.tokenizer.encode(" seven")[0]
    body = {"stop_token_ids": [word]}
    made = complete(client, logit_bias={str(word): 100}, extra_body=body)
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("", "stop")
    assert made.usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, servers.VOCABULARY]}, "prompt[1]"),
        ({"prompt": [1, servers.IMAGE_ID]}, "prompt[1]"),
        ({"prompt": "<｜deepseek_image｜>", "parse_special_tokens": True}, "prompt"),
        ({"prompt": [[1, 2], [-1]]}, "prompt[1][0]"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": [5] * 1100}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": "no"}, "echo"),
    ],
)
def test_a_wrong_field_is_named(http, change, param):
    body = json.dumps({"prompt": "x", "max_tokens": 1} | change)
    answer = http.post("/v1/completions", content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"].split("[0][")[0] == param.split("[0][")[0], error
