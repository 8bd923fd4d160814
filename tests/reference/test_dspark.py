"""The reference draft: the published examples, what a block sees, and where values are rounded."""

import numpy as np
import pytest

from checkpoints.load import Checkpoint
from tests.helpers import golden
from v41jax.reference.dspark import ReferenceDraft, accepted_count, pick
from v41jax.reference.numerics import round_to_bfloat16

END = 30
"""Processed positions; the window of the checkpoint is 8."""


@pytest.fixture(scope="module")
def checkpoint():
    with Checkpoint.open(golden.directory("five-layer"), scopes=("text", "draft")) as opened:
        yield opened


@pytest.fixture(scope="module")
def draft(checkpoint):
    return ReferenceDraft(checkpoint, activation_quantization=False)


@pytest.fixture(scope="module")
def features(checkpoint):
    return np.random.default_rng(0).normal(size=(END, 3 * checkpoint.config.text.hidden_size))


@pytest.fixture(scope="module")
def context(draft, features):
    return draft.context_keys(features, np.arange(END))


def test_the_published_picking_example():
    embed = np.array([[1, 0], [0, 1], [1, 1], [-1, 0.5]])
    head = np.array([[0, 0], [1, 0], [0, 1], [2, -1]])
    base = np.array([[1.5, 0.2, 0.4, 0.3], [2.5, 0, 0, 0.4], [1, 0.5, 3, 1.2]])
    proposals, logits, embeddings = pick(2, base, embed, head)
    assert proposals.tolist() == [0, 0, 3]
    np.testing.assert_allclose(logits, [[1.5, 1.2, 1.4, 1.3], [2.5, 1, 0, 2.4], [1, 1.5, 3, 3.2]], rtol=0, atol=1e-15)
    assert embeddings.tolist() == embed[[2, 0, 0]].tolist()


def test_the_published_verification_example():
    assert accepted_count([0, 0, 1, 2, 1, 7], [0, 0, 3, 2, 1]) == 2
    assert accepted_count([4], []) == 0
    assert accepted_count([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5]) == 5


def test_a_context_key_belongs_to_its_position_alone(draft, features, context):
    some = np.array([3, 17, 29])
    assert np.abs(draft.context_keys(features[some], some) - context[:, some]).max() < 1e-12
    moved = draft.context_keys(features[some], some + 1)
    assert np.abs(moved - context[:, some])[..., -draft.text.qk_rope_head_dim :].max() > 1e-3
    unrotated = slice(0, draft.text.head_dim - draft.text.qk_rope_head_dim)
    assert np.abs(moved - context[:, some])[..., unrotated].max() < 1e-12


def test_a_block_sees_the_window_that_ends_at_the_last_committed_position(draft, context):
    window = draft.text.sliding_window
    expected = draft.draft(9, END - 1, context)
    hidden = context.copy()
    hidden[:, : END - window] = np.nan
    assert np.array_equal(draft.draft(9, END - 1, hidden).hidden, expected.hidden)
    for position in (END - window, END - 1):
        changed = context.copy()
        changed[:, position] += 1
        difference = np.abs(draft.draft(9, END - 1, changed).hidden - expected.hidden).max(axis=1)
        # The window does not slide: every row of the block sees it whole.
        assert (difference > 1e-6).all()


def test_every_row_of_a_block_sees_every_key_of_it(draft, context):
    streams, pre_mix = draft.first_streams(9)
    expected = draft.run_stage(0, streams, pre_mix, END - 1, context[0]).attention_output
    for row in range(streams.shape[0]):
        changed = streams.copy()
        changed[row] = np.random.default_rng(row).normal(size=changed[row].shape)
        output = draft.run_stage(0, changed, pre_mix, END - 1, context[0]).attention_output
        assert (np.abs(output - expected).max(axis=1) > 1e-9).all()


def test_a_short_context_and_none_at_all(draft, context):
    for end in (1, 2, 5):
        record = draft.draft(9, end - 1, context[:, :end])
        assert np.isfinite(record.logits).all() and np.isfinite(record.confidence).all()
    # A block behind nothing is its own keys and the sink.
    assert np.isfinite(draft.draft(9, -1, context[:, :0]).logits).all()


class ImageBiased:
    """A checkpoint whose `bias_vl` would send every row to other experts."""

    def __init__(self, checkpoint):
        self.config, self._tensor = checkpoint.config, checkpoint.tensor

    def tensor(self, name):
        value = self._tensor(name)
        return np.linspace(1e3, 0, value.size, dtype=np.float32) if name.endswith("gate.bias_vl") else value


def test_blocks_are_routed_by_the_text_bias(checkpoint, draft, context):
    other = ReferenceDraft(ImageBiased(checkpoint), activation_quantization=False)
    assert np.array_equal(other.draft(9, END - 1, context).logits, draft.draft(9, END - 1, context).logits)


def test_released_rounding_points(checkpoint, features):
    draft = ReferenceDraft(checkpoint, rounding="bfloat16")
    keys = draft.context_keys(round_to_bfloat16(features), np.arange(END))
    assert np.array_equal(round_to_bfloat16(keys), keys)
    record = draft.draft(9, END - 1, keys)
    assert np.array_equal(round_to_bfloat16(record.hidden), record.hidden)
    # Logits, bias and confidence stay unrounded.
    for value in (record.base_logits, record.logits, record.confidence):
        assert not np.array_equal(round_to_bfloat16(value), value)
