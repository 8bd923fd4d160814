"""Decoding by verify steps at model level: the committed state is that of a run fed only the committed tokens."""

import numpy as np
import pytest

from tests.dspark import driver
from tests.dspark.driver import REQUESTS, WIDTH, Driver
from v41jax.sampling import SamplingInputs

PROMPTS = {1: 20, 2: 5, 3: 45}
"""Prompt length by slot; slot 0 belongs to a request that is never scheduled, and padding names it."""

PLAIN_STEPS = 120


def prompts(seed=0):
    rng = np.random.default_rng(seed)
    return {slot: rng.integers(3, 500, length) for slot, length in PROMPTS.items()}


def ready(model, draft, seed=0):
    """Prefilled slots 1..3, and a live slot 0."""
    run = Driver(model, draft)
    run.prefill(0, [7, 8, 9])
    for slot, prompt in prompts(seed).items():
        run.prefill(slot, prompt)
    return run


@pytest.fixture(scope="module")
def plain():
    """Slot -> greedy tokens of plain decoding, the first from the prefill."""
    run = ready(*driver.load())
    tokens = {slot: [run.anchors[slot]] for slot in PROMPTS}
    for _ in range(PLAIN_STEPS):
        for slot, emitted in zip(PROMPTS, run.verify({slot: [] for slot in PROMPTS})[0]):
            assert len(emitted) == 1
            tokens[slot] += emitted
    return tokens


def planned(run, slot, plain, accepted, width):
    """`width` proposals of which the first `accepted` are the target's and the next is not."""
    done = len(run.tokens[slot]) - PROMPTS[slot]
    ahead = plain[slot][done + 1 : done + 1 + width]
    return [token if index < accepted else (token + 1) % 500 for index, token in enumerate(ahead)]


def assert_same_bytes(ours, theirs, where):
    for name, value in ours.items():
        assert value.shape == theirs[name].shape and value.tobytes() == theirs[name].tobytes(), (name, where)


def test_after_any_commit_the_state_is_that_of_the_committed_tokens_alone(plain):
    """Invariants 39 and 40: every accepted length at every ring phase, ragged widths, changing company."""
    model, draft = driver.load()
    drafting, fed = ready(model, draft), ready(model, draft)
    idle = drafting.state(0)
    ring = model.setup.geometry.ring
    rng = np.random.default_rng(3)
    uncovered = {(phase, accepted) for phase in range(ring) for accepted in range(WIDTH)}
    budget = dict.fromkeys(PROMPTS, PLAIN_STEPS - WIDTH)
    rounds = 0
    while uncovered and rounds < 400:
        rounds += 1
        slots = [slot for slot in rng.permutation(list(PROMPTS)).tolist() if budget[slot] >= 0]
        if len(slots) < REQUESTS:
            # Enough of these requests: the same ones from their prompts again.
            drafting, fed = ready(model, draft), ready(model, draft)
            budget = dict.fromkeys(PROMPTS, PLAIN_STEPS - WIDTH)
            continue
        slots = slots[: int(rng.integers(1, REQUESTS + 1))]
        proposals, committed = {}, {}
        for slot in slots:
            phase = len(drafting.tokens[slot]) % ring
            wanted = [accepted for accepted in range(WIDTH) if (phase, accepted) in uncovered]
            accepted = int(rng.choice(wanted)) if wanted else int(rng.integers(WIDTH))
            uncovered.discard((phase, accepted))
            width = int(rng.integers(accepted, WIDTH))
            proposals[slot] = planned(drafting, slot, plain, accepted, width)
            committed[slot] = proposals[slot][:accepted]
            budget[slot] -= accepted + 1
        emitted, logits = drafting.verify(proposals)
        expected, expected_logits = fed.verify(committed)
        assert emitted == expected
        assert [len(tokens) for tokens in emitted] == [len(tokens) + 1 for tokens in committed.values()]
        row = expected_row = 0
        for slot in slots:
            count = len(committed[slot]) + 1
            assert drafting.state(slot)["cursor"].tolist() == drafting.cursor_of_tokens(slot)
            # The rows after a rejection read nothing that the rejected rows wrote.
            assert np.array_equal(logits[row : row + count], expected_logits[expected_row : expected_row + count])
            row, expected_row = row + len(proposals[slot]) + 1, expected_row + count
            assert_same_bytes(
                drafting.state(slot), fed.state(slot), (slot, proposals[slot], len(drafting.tokens[slot]))
            )
        assert_same_bytes(drafting.state(0), idle, "slot 0")
    assert not uncovered


def test_greedy_speculation_emits_the_tokens_of_plain_decoding(plain):
    run = ready(*driver.load())
    rng = np.random.default_rng(5)
    tokens = {slot: [run.anchors[slot]] for slot in PROMPTS}
    while min(map(len, tokens.values())) <= 25:
        # What the draft says, and now and then what the target will say.
        block = run.draft(list(PROMPTS)).tokens
        proposals = {}
        for index, slot in enumerate(PROMPTS):
            helped = planned(run, slot, plain, int(rng.integers(WIDTH)), WIDTH - 1)
            proposals[slot] = helped if rng.random() < 0.5 else block[index].tolist()
        for slot, emitted in zip(PROMPTS, run.verify(proposals)[0]):
            tokens[slot] += emitted
    for slot in PROMPTS:
        assert tokens[slot] == plain[slot][: len(tokens[slot])]


def drawing(run, temperature=1.0):
    positions = [len(run.tokens[slot]) + 1 for slot in PROMPTS]
    return SamplingInputs(
        temperature=np.full(REQUESTS, temperature, np.float32),
        top_k=np.array([0, 20, 0], np.int32),
        top_p=np.array([1.0, 1.0, 0.9], np.float32),
        min_p=np.zeros(REQUESTS, np.float32),
        seeds=np.array([1, 2, 3], np.uint32),
        positions=np.array(positions, np.int32),
    )


def test_sampled_speculation_emits_the_tokens_of_plain_sampling():
    model, draft = driver.load()
    run = ready(model, draft)
    expected = {slot: [run.anchors[slot]] for slot in PROMPTS}
    for _ in range(40):
        for slot, emitted in zip(PROMPTS, run.verify({slot: [] for slot in PROMPTS}, drawing(run))[0]):
            expected[slot] += emitted
    run = ready(model, draft)
    tokens = {slot: [run.anchors[slot]] for slot in PROMPTS}
    rng = np.random.default_rng(6)
    steps = 0
    while min(map(len, tokens.values())) <= 30:
        steps += 1
        proposals = {
            slot: planned(run, slot, expected, int(rng.integers(WIDTH)), int(rng.integers(WIDTH))) for slot in PROMPTS
        }
        for slot, emitted in zip(PROMPTS, run.verify(proposals, drawing(run))[0]):
            tokens[slot] += emitted
    assert steps < 30
    for slot in PROMPTS:
        count = min(len(tokens[slot]), len(expected[slot]))
        assert tokens[slot][:count] == expected[slot][:count]


def test_packed_caches_commit_the_same_state():
    """FP4 main rows, FP8 rings and quantized activations; a run fed only the committed tokens, byte for byte."""
    model, draft = driver.load(quantized=True, packed=True)
    oracle = ready(model, draft)
    tokens = {slot: [oracle.anchors[slot]] for slot in PROMPTS}
    for _ in range(45):
        for slot, emitted in zip(PROMPTS, oracle.verify({slot: [] for slot in PROMPTS})[0]):
            tokens[slot] += emitted
    drafting, fed = ready(model, draft), ready(model, draft)
    rng = np.random.default_rng(8)
    for _ in range(8):
        accepted = {slot: int(rng.integers(WIDTH)) for slot in PROMPTS}
        proposals = {slot: planned(drafting, slot, tokens, accepted[slot], WIDTH - 1) for slot in PROMPTS}
        emitted, _ = drafting.verify(proposals)
        expected, _ = fed.verify({slot: proposals[slot][: accepted[slot]] for slot in PROMPTS})
        assert emitted == expected
        for slot in PROMPTS:
            assert_same_bytes(drafting.state(slot), fed.state(slot), slot)
