"""Whole rounds of draft and verification against the float64 reference's, with drafts of known quality."""

import itertools

import numpy as np
import pytest

from tests.dspark import driver
from tests.dspark.driver import Driver
from tests.dspark.planted import PlantedCheckpoint
from v41jax.draft_parameters import load_draft_parameters
from v41jax.reference import ReferenceModel
from v41jax.reference.dspark import ReferenceDraft, speculate

PROMPTS = tuple(np.random.default_rng(seed).integers(3, 500, length) for seed, length in ((21, 6), (22, 19)))
ROUNDS = 5


@pytest.fixture(scope="module")
def target():
    with ReferenceModel(driver.open_checkpoint(), activation_quantization=False) as model:
        yield model


def greedy(target, prompt, count):
    output = target.forward(prompt, record=False)
    tokens = [int(np.argmax(output.logits[-1]))]
    for _ in range(count - 1):
        output = target.forward(tokens[-1:], state=output.state, record=False)
        tokens.append(int(np.argmax(output.logits[-1])))
    return tokens


@pytest.fixture(scope="module")
def planted(target):
    """A draft that knows the target's choices but for every seventh one."""
    successors = {}
    for prompt in PROMPTS:
        tokens = greedy(target, prompt, 6 * ROUNDS)
        for index, (token, successor) in enumerate(itertools.pairwise(tokens)):
            if index % 7 != 3:
                successors[token] = successor
    return PlantedCheckpoint(driver.open_checkpoint(), successors)


@pytest.mark.parametrize("quality", ["as stored", "planted"])
def test_rounds_are_the_references(target, planted, quality):
    model, stored = driver.load()
    weights = stored if quality == "as stored" else load_draft_parameters(planted, form="dequantized", dtype="float32")
    source = driver.open_checkpoint() if quality == "as stored" else planted
    reference = ReferenceDraft(source, activation_quantization=False)
    expected = [speculate(target, reference, prompt, ROUNDS) for prompt in PROMPTS]
    run = Driver(model, weights)
    for slot, prompt in enumerate(PROMPTS):
        run.prefill(slot, prompt)
    accepted = []
    for number in range(ROUNDS):
        block = run.draft(range(len(PROMPTS)))
        anchors = dict(run.anchors)
        emitted, _ = run.verify({slot: block.tokens[slot].tolist() for slot in range(len(PROMPTS))})
        for slot, rounds in enumerate(expected):
            assert anchors[slot] == rounds[number].anchor
            assert block.tokens[slot].tolist() == rounds[number].proposals.tolist()
            assert tuple(emitted[slot]) == rounds[number].emitted
            accepted.append(rounds[number].accepted)
    if quality == "planted":
        assert 5 in accepted and any(0 < count < 5 for count in accepted), accepted


def test_the_references_speculation_emits_its_plain_greedy_tokens(target, planted):
    reference = ReferenceDraft(planted, activation_quantization=False)
    for prompt in PROMPTS:
        rounds = speculate(target, reference, prompt, 3)
        emitted = [rounds[0].anchor, *(token for one in rounds for token in one.emitted)]
        assert emitted == greedy(target, prompt, len(emitted)) and len(emitted) > 4
