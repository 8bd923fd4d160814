"""Prefill in any chunks and any company: tokens and logits of one-shot runs (scenarios A1-A4, A18, A22, A32)."""

from __future__ import annotations

import numpy as np
import pytest

from tests.acceptance.model import PAGE, WINDOW
from tests.acceptance.prompts import CHINESE, CODE, ENGLISH, random_prompt, text_prompt
from tests.acceptance.serving import MAX_LEN, OFF, ROWS

UNCUT = OFF | {"state_checkpoint_interval_tokens": 0}
"""No chunk is cut short for an image."""
CHUNKS = {"long_prefill_token_threshold": PAGE, "max_num_batched_tokens": 2 * PAGE}


def run_chunks(session, request_id, prompt, count, lengths):
    """One request alone, its forwards as long as given, the last length repeated."""
    session.add(request_id, prompt, count)
    before = len(session.log)
    for length in lengths:
        session.cap(length)
        session.step()
    session.run()
    session.cap(0)
    assert [end - start for start, _, end in session.forwards(request_id)][: len(lengths)] == list(lengths)
    assert len(session.log) > before + len(lengths)


def test_chunked_batched_and_reordered(exact):
    """A1."""
    session = exact.session(**OFF, **CHUNKS)
    session.add("long", random_prompt(150, 1), 6)
    session.add("short", random_prompt(70, 2), 9)
    while session.core.has_work:
        session.step()
        session.scheduler.running.reverse()
    session.run()
    assert len(session.forwards("long")) - 6 >= 150 // PAGE
    assert {len(result.tokens) for result in session.finished.values()} == {6, 9}
    session.assert_expected()


@pytest.mark.parametrize("text", [ENGLISH, CHINESE, CODE], ids=["english", "chinese", "code"])
def test_ragged_spans(exact, text):
    """A2; the watch compares the cursor with end and history after every chunk."""
    session = exact.session(**UNCUT)
    run_chunks(session, 0, text_prompt(text)[: MAX_LEN - 8], 4, (3, 1, WINDOW + 1, 7, WINDOW))
    session.assert_expected()


@pytest.mark.parametrize("lengths", [(WINDOW + 1, 2 * WINDOW, 40), (4 * WINDOW + 3, 2), (2, 4 * WINDOW + 8), (ROWS,)])
def test_a_chunk_wider_than_the_ring(exact, lengths):
    """A3."""
    session = exact.session(**UNCUT)
    run_chunks(session, 0, random_prompt(ROWS + 20, 3), 4, lengths)
    session.assert_expected()
    narrow = exact.session(**UNCUT)
    run_chunks(narrow, 0, random_prompt(ROWS + 20, 3), 4, (WINDOW // 2,) * 10)
    narrow.assert_expected()


@pytest.mark.parametrize("length", [1, 3, 5, 31])
def test_odd_cuts_of_pairs(exact, length):
    """A4: a group that straddles two chunks is completed from the tail, once."""
    session = exact.session(**UNCUT)
    run_chunks(session, 0, random_prompt(67, 4), 3, (length,) * (67 // length - (67 % length == 0)))
    session.assert_expected()


@pytest.mark.parametrize("decoder", [False, True], ids=["full", "tail"])
@pytest.mark.parametrize("length", [1, 2, WINDOW - 1])
def test_prompts_shorter_than_a_window(exact, length, decoder):
    """A18: the tail is the whole prompt and nothing is cut, so that all modes agree."""
    options = UNCUT | {"decoder_swa_bounded_replay": decoder}
    session = exact.session(**options)
    session.add("whole", random_prompt(length, 5), 5)
    session.run()
    session.cap(1)
    session.add("by ones", random_prompt(length, 5), 5)
    session.run()
    session.assert_expected(decoder=False)


def test_finishing_and_continuing_requests_in_one_batch(exact):
    """A22: only the finishing ones get a token."""
    session = exact.session(**OFF)
    session.cap(PAGE)
    lengths = {"a": 20, "b": 60, "c": 90}
    for seed, (name, length) in enumerate(lengths.items()):
        session.add(name, random_prompt(length, 10 + seed), 4)
    outputs = []
    while session.core.has_work:
        outputs += [(output.request_id, output.new_tokens) for output in session.step()]
    assert [batch.is_final.tolist() for batch in session.log[:2]] == [[True, False, False], [True, False]]
    assert len(session.log[0].output_requests) == 1
    assert sum(len(tokens) for _, tokens in outputs) == 12
    session.run()
    session.assert_expected()


def test_a_context_that_is_pruned_at_both_levels(exact, reference):
    """A32: far more groups than a selection holds and more blocks than the candidates, against the float64 model."""
    session = exact.session(**OFF)
    prompt = random_prompt(290, 6)
    session.add(0, prompt, 6)
    session.run()
    session.assert_expected()
    tokens = session.finished[0].tokens
    output = reference.forward(np.asarray([*prompt, *tokens[:-1]]))
    text = reference.config.text
    for layer in output.layers:
        if layer.index_scores is not None:
            visible = (np.arange(295) + 1) // reference.config.layers[layer.layer].ratio
            counts = (layer.topk >= 0).sum(axis=1)
            assert counts.tolist() == np.minimum(visible, text.index_topk).tolist()
        if layer.candidate_blocks is not None:
            blocks = (layer.candidate_blocks >= 0).sum(axis=1)
            wanted = np.minimum(-(-(np.arange(295) + 1) // text.candidate_block_size), text.candidate_topk_blocks)
            assert blocks.tolist() == wanted.tolist()
    for index, token in enumerate(tokens):
        wanted = output.logits[len(prompt) - 1 + index]
        found = session.logits[0, len(prompt) + index]
        assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)
        assert token == wanted.argmax()
