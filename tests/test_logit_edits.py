"""Biases, penalties and constraints: what the host plans and what the device makes of it."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from scheduler.scheduled_batch import Phase
from scheduler.sequence import PLACEHOLDER, SamplingParams, Sequence
from v41jax.logit_edits import EditPlanner
from v41jax.runner import empty_edits
from v41jax.sampling import SamplingInputs, change_adjustments, choose_tokens, edit_logits, sample, token_scores
from v41jax.verification import Verified, edit_rows, keep_changes

VOCABULARY, SLOTS = 70, 3
PENALIZED = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((7, 3.0), (69, -100.0)))


@jax.jit
def edit(logits, adjustments, edits):
    adjustments = change_adjustments(adjustments, edits)
    return adjustments, edit_logits(logits, adjustments, edits)


class Device:
    """Planner and adjustments as an engine holds them, for one request at a time."""

    def __init__(self):
        self.adjustments = jnp.zeros((SLOTS, VOCABULARY), jnp.float32)
        self.loads = 0
        self.planner = EditPlanner(SLOTS, VOCABULARY, empty_edits, self.load)

    def load(self, slot, row):
        self.adjustments = self.adjustments.at[slot].set(row)
        self.loads += 1

    def step(self, sequence, slot, end, newest, generation=1):
        """What one step adds to the logits of the token at `end`."""
        batch = SimpleNamespace(
            phase=Phase.DECODE,
            output_requests=np.array([0]),
            request_ids=(sequence.request_id,),
            generations=(generation,),
            sampling=(sequence.sampling,),
            slots=np.array([slot]),
            ends=np.array([end]),
            lengths=np.array([1]),
            token_ids=np.array([newest]),
        )
        edits = self.planner.plan(batch, 2, lambda _: sequence)
        if edits is None:
            return np.zeros(VOCABULARY)
        self.adjustments, logits = edit(jnp.zeros((2, VOCABULARY)), self.adjustments, edits)
        assert not np.asarray(logits[1]).any()
        return np.asarray(logits[0])


def expected(sampling, generated):
    row = np.zeros(VOCABULARY, np.float32)
    for token, bias in sampling.logit_bias:
        row[token] += bias
    for token in set(generated):
        row[token] -= sampling.frequency_penalty * generated.count(token) + sampling.presence_penalty
    return row


def grow(sequence, token, *, finalized=True):
    sequence.append_placeholder()
    if finalized:
        sequence.finalize(sequence.num_finalized_tokens, token)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 68), max_size=12), st.integers(0, 11))
def test_every_step_sees_all_tokens_before_it_also_after_a_preemption(generated, preempted_at):
    device, sequence = Device(), Sequence("a", [1, 2, 3], PENALIZED)
    generation, slot = 1, 0
    for count in range(len(generated) + 1):
        if count == preempted_at:
            generation, slot = 3, 2
        newest = generated[count - 1] if count else 3
        if count:
            # The newest token is known to the engine before the scheduler takes it in.
            grow(sequence, newest, finalized=False)
            assert sequence.token(2 + count) == PLACEHOLDER
        row = device.step(sequence, slot, 3 + count, newest, generation)
        np.testing.assert_allclose(row, expected(PENALIZED, generated[:count]), atol=1e-5)
        if count:
            sequence.finalize(2 + count, newest)
    assert device.loads == 1 + (0 < preempted_at <= len(generated))


def test_a_slot_forgets_the_request_before():
    device = Device()
    device.step(Sequence("a", [1], PENALIZED), 1, 1, 1)
    other = dataclasses.replace(PENALIZED, logit_bias=())
    assert not device.step(Sequence("b", [1], other), 1, 1, 1).any()
    assert not device.step(Sequence("c", [1], SamplingParams()), 1, 1, 1).any()
    assert device.loads == 2


def test_a_constraint_leaves_only_what_it_allows():
    class Even:
        def write_mask(self, generated, words):
            assert (generated.count, generated.newest) == (2, 9)
            words[:] = 0x55555555
            return True

    device, sequence = Device(), Sequence("a", [1], SamplingParams())
    for token in (8, 9):
        grow(sequence, token)
    device.planner.constraints["a"] = Even()
    row = device.step(sequence, 0, 3, 9)
    assert np.isneginf(row[1::2]).all() and not row[::2].any()


@jax.jit
def edit_block(adjustments, edits, batch_ids, cu_seqlens, committed):
    slots = jnp.zeros(len(committed), jnp.int32)
    step = SimpleNamespace(batch_ids=batch_ids, cu_seqlens=cu_seqlens, positions=batch_ids, slots=slots)
    logits = edit_rows(jnp.zeros((len(batch_ids), VOCABULARY)), adjustments, edits, step, Block.WIDTH)
    verified = Verified(jnp.zeros((len(committed), Block.WIDTH), jnp.int32), committed)
    return logits, keep_changes(adjustments, edits, step, verified, Block.WIDTH)


class Block:
    """A verify step of one request: the edits of its rows, and what they make of plain logits."""

    WIDTH = 4

    def __init__(self, device):
        self.device = device

    def step(self, sequence, proposals, committed):
        rows = 1 + len(proposals)
        newest = sequence.token(sequence.num_finalized_tokens - 1)
        end = sequence.num_finalized_tokens + len(proposals)
        batch = SimpleNamespace(
            phase=Phase.DECODE,
            output_requests=np.array([0]),
            request_ids=(sequence.request_id,),
            generations=(1,),
            sampling=(sequence.sampling,),
            slots=np.array([1]),
            ends=np.array([end]),
            lengths=np.array([rows]),
            token_ids=np.array([newest, *proposals]),
        )
        edits = self.device.planner.plan(batch, 2 * self.WIDTH, lambda _: sequence)
        count = 2 * self.WIDTH
        ids = np.where(np.arange(count) < rows, 0, -1).astype(np.int32)
        offsets, committed = np.array([0, rows, rows], np.int32), np.array([committed, 0], np.int32)
        logits, self.device.adjustments = edit_block(self.device.adjustments, edits, ids, offsets, committed)
        assert not np.asarray(logits[rows:]).any()
        return np.asarray(logits[:rows])


@settings(max_examples=25)
@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=3), st.integers(0, 3)), min_size=1, max_size=5))
def test_a_proposals_row_counts_the_proposals_before_it_and_only_accepted_ones_are_kept(rounds):
    device, sequence = Device(), Sequence("a", [1, 2, 3], PENALIZED)
    block = Block(device)
    grow(sequence, 5)
    for proposals, accepted in rounds:
        accepted = min(accepted, len(proposals))
        rows = block.step(sequence, proposals, accepted + 1)
        for place, row in enumerate(rows):
            generated = [*sequence.output_tokens, *proposals[:place]]
            np.testing.assert_allclose(row, expected(PENALIZED, generated), atol=1e-5)
        for token in (*proposals[:accepted], 6):
            grow(sequence, token)
    assert device.loads == 1


@pytest.mark.parametrize("generation", ["cpu", "cuda"])
def test_changes_of_rows_that_became_real_are_added_one_after_the_other(generation):
    random = np.random.default_rng(0)
    before = random.normal(size=(3, VOCABULARY)).astype(np.float32)
    lengths, committed, slots = (4, 3, 2), (3, 3, 0), (2, 0, 3)
    ids = np.repeat(np.arange(3), lengths).astype(np.int32)
    edits = empty_edits(len(ids), 3, VOCABULARY)._replace(
        slots=np.int32(slots)[ids],
        tokens=np.array([7, 7, 7, 7, 1, 9, 1, 7, 7], np.int32),
        changes=random.normal(size=len(ids)).astype(np.float32),
    )
    step = SimpleNamespace(
        batch_ids=jnp.asarray(ids),
        cu_seqlens=jnp.asarray(np.cumsum([0, *lengths]), jnp.int32),
        positions=jnp.asarray(ids),
        slots=jnp.zeros(3, jnp.int32),
    )
    verified = Verified(jnp.zeros((3, 4), jnp.int32), jnp.asarray(committed, jnp.int32))
    expected = before.copy()
    for row, request in enumerate(ids):
        if row - sum(lengths[:request]) < committed[request]:
            expected[slots[request], edits.tokens[row]] += edits.changes[row]
    with backend.use_target(backend.Target("triton", generation)):
        # A function of its own for each target, as below.
        given = jnp.asarray(before), jax.tree.map(jnp.asarray, edits)
        traced = jax.make_jaxpr(lambda *given: keep_changes(*given, step, verified, 4))(*given)
        found = keep_changes(*given, step, verified, 4)
    np.testing.assert_array_equal(found, expected)
    assert ("cond" in str(traced)) == (generation == "cpu"), "a branch copies what it hands through"


def test_masks_follow_the_proposals_up_to_one_that_is_not_allowed():
    class Even:
        seen = ()

        def write_mask(self, generated, words):
            self.seen = (*self.seen, (generated.count, generated.newest))
            words[:] = 0x55555555
            return True

    device, sequence = Device(), Sequence("a", [1], SamplingParams())
    constraint = device.planner.constraints["a"] = Even()
    grow(sequence, 8)
    batch = SimpleNamespace(
        phase=Phase.DECODE,
        output_requests=np.array([0]),
        request_ids=("a",),
        generations=(1,),
        sampling=(sequence.sampling,),
        slots=np.array([1]),
        ends=np.array([6]),
        lengths=np.array([5]),
        token_ids=np.array([8, 10, 12, 13, 14]),
    )
    edits = device.planner.plan(batch, 8, lambda _: sequence)
    assert constraint.seen == ((1, 8), (2, 10), (3, 12))
    assert edits.constrained.tolist() == [True] * 3 + [False] * 5


@pytest.mark.parametrize("generation", ["cpu", "cuda"])
@pytest.mark.parametrize("alternatives", [1, 5, 500])
def test_scores_are_the_log_softmax_best_first(alternatives, generation):
    logits = np.random.default_rng(0).normal(size=(4, 60)).astype(np.float32) * 5
    logits[1, 3] = logits[1, 40] = logits.max() + 1
    logits[2, 7:12] = [-0.0, 0.0, -0.0, 0.0, -0.0]
    logits[2, logits[2] > 0] *= -1
    chosen = np.array([0, 40, 2, 59])
    with backend.use_target(backend.Target("triton", generation)):
        scores = token_scores(jnp.asarray(logits), jnp.asarray(chosen), jnp.asarray(True), alternatives)
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(scores.chosen, logprobs[np.arange(4), chosen], atol=1e-4)
    order = np.argsort(-logprobs, axis=1, kind="stable")[:, : min(alternatives, 60)]
    assert np.asarray(scores.top_ids).tolist() == order.tolist()
    np.testing.assert_allclose(scores.top, np.take_along_axis(logprobs, order, axis=1), atol=1e-4)
    idle = token_scores(jnp.asarray(logits), jnp.asarray(chosen), jnp.asarray(False), alternatives)
    assert not np.asarray(idle.top).any() and not np.asarray(idle.chosen).any()


def test_what_a_gpu_may_skip_holds_nothing_that_no_graph_captures():
    """XLA's top-k is such a thing, and the host then waits for the device before every branch."""

    def scores(logits, chosen, wanted):
        return token_scores(logits, chosen, wanted)

    arguments = jnp.zeros((2, 60)), jnp.zeros(2, jnp.int32), jnp.asarray(False)
    for generation, captured in (("cuda", True), ("rocm", True), ("cpu", False)):
        with backend.use_target(backend.Target("triton", generation)):
            # A function of its own: one traced for another target keeps what it was traced with.
            traced = str(jax.make_jaxpr(lambda *given: scores(*given))(*arguments))
        assert ("top_k" not in traced) == captured, generation


NOBODY = SamplingInputs(
    *(jnp.zeros(2, dtype) for dtype in ("float32", "int32")),
    jnp.ones(2),
    *(jnp.zeros(2, dtype) for dtype in ("float32", "uint32", "int32")),
)


@pytest.mark.parametrize("asked", ["nothing", "bias", "constraint", "draw", "scores"])
def test_what_one_row_asks_for_changes_that_row_alone(asked):
    """Whether a step takes the branch of the largest logits or the other one, a row's token is its own."""
    never = 9
    logits = np.random.default_rng(1).normal(size=(2, VOCABULARY)).astype(np.float32)
    logits[:, never] = 100.0
    best = np.argsort(-logits, axis=1)[:, 1]
    edits, inputs, scored, expected = empty_edits(2, SLOTS, VOCABULARY), NOBODY, False, best.copy()
    if asked == "bias":
        edits.slots[0], edits.tokens[0], edits.changes[0], expected[0] = 1, 5, 50.0, 5
    elif asked == "constraint":
        edits.constrained[0], edits.allowed[0], expected[0] = True, [1 << 3, 0, 0], 3
    elif asked == "draw":
        # Hot enough to draw evenly: the noise alone decides.
        inputs = inputs._replace(temperature=jnp.asarray([1e30, 0.0]))
        alone = sample(jnp.asarray(logits[:1]).at[:, never].set(-jnp.inf), jax.tree.map(lambda part: part[:1], inputs))
        expected[0] = int(alone[0])
        assert expected[0] != best[0]
    elif asked == "scores":
        scored = True
    changed, tokens, scores = jax.jit(choose_tokens, static_argnames="never")(
        jnp.asarray(logits), jnp.zeros((SLOTS, VOCABULARY)), edits, inputs, jnp.asarray(scored), never=never
    )
    assert np.asarray(tokens).tolist() == expected.tolist()
    assert np.asarray(scores.chosen).all() == scored and np.asarray(scores.top).any() == scored
    assert np.asarray(changed).sum() == (50.0 if asked == "bias" else 0.0)
