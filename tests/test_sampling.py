"""Sampling: each row alone, exact filters, and the distribution that the parameters describe."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from v41jax.sampling import SamplingInputs, kept, sample


def inputs(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seeds=0, positions=0):
    def full(value, dtype):
        return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

    return SamplingInputs(
        full(temperature, jnp.float32),
        full(top_k, jnp.int32),
        full(top_p, jnp.float32),
        full(min_p, jnp.float32),
        full(seeds, jnp.uint32),
        full(positions, jnp.int32),
    )


def draw(logits, parameters):
    return np.asarray(sample(jnp.asarray(logits, jnp.float32), parameters))


def test_temperature_zero_takes_the_largest_logit_and_the_smaller_id_on_ties():
    logits = np.array([[0.0, 3.0, 3.0, -1.0], [2.0, 2.0, 2.0, 2.0]])
    assert draw(logits, inputs(2, temperature=0.0)).tolist() == [1, 0]
    assert draw(logits, inputs(2, temperature=np.array([0.0, 1.0]), top_k=1)).tolist() == [1, 0]


def test_a_row_draws_the_same_token_alone_and_in_any_batch():
    logits = np.random.default_rng(0).normal(size=(6, 50))
    seeds, positions = np.arange(6) * 7, np.arange(6) + 3
    together = draw(logits, inputs(6, seeds=seeds, positions=positions, top_k=20, top_p=0.9))
    for row in np.random.default_rng(1).permutation(6):
        alone = draw(logits[row : row + 1], inputs(1, seeds=seeds[row], positions=positions[row], top_k=20, top_p=0.9))
        assert alone[0] == together[row]


def test_seed_and_position_both_change_the_noise():
    logits = np.zeros((64, 1000))
    by_seed = draw(logits, inputs(64, seeds=np.arange(64)))
    by_position = draw(logits, inputs(64, positions=np.arange(64)))
    assert len(set(by_seed.tolist())) > 50
    assert len(set(by_position.tolist())) > 50


@pytest.mark.parametrize(
    ("parameters", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
        ({"min_p": 0.5}, {0, 1}),
        ({"min_p": 0.51}, {0}),
        ({"top_k": 2, "top_p": 0.66}, {0}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_filters_keep_exactly_the_described_tokens(parameters, allowed):
    logits = np.log(np.array([0.5, 0.25, 0.125, 0.125]))
    drawn = draw(np.tile(logits, (512, 1)), inputs(512, seeds=np.arange(512), **parameters))
    assert set(drawn.tolist()) == allowed


def test_top_k_breaks_ties_toward_the_smaller_id():
    drawn = draw(np.zeros((256, 5)), inputs(256, seeds=np.arange(256), top_k=2))
    assert set(drawn.tolist()) == {0, 1}


def test_drawn_frequencies_follow_the_tempered_softmax():
    logits = np.array([1.0, 0.0, -1.0, 2.0, -3.0])
    draws = 20_000
    drawn = draw(np.tile(logits, (draws, 1)), inputs(draws, seeds=np.arange(draws), temperature=0.7))
    expected = np.asarray(jax.nn.softmax(logits / 0.7))
    observed = np.bincount(drawn, minlength=5) / draws
    # Five standard deviations of a binomial share.
    assert np.all(np.abs(observed - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws))


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-37, 1e-45])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}])
def test_the_smallest_temperatures_take_the_largest_logit(temperature, filters):
    logits = np.tile([10.0, 30.0, 20.0, -np.inf, 29.0], (64, 1))
    assert set(draw(logits, inputs(64, seeds=np.arange(64), temperature=temperature, **filters)).tolist()) == {1}


def test_the_largest_temperature_draws_evenly_among_what_is_allowed():
    logits = np.tile([50.0, -50.0, 0.0, -np.inf], (3000, 1))
    drawn = draw(logits, inputs(3000, seeds=np.arange(3000), temperature=3e38))
    assert np.abs(np.bincount(drawn, minlength=4) / 3000 - [1 / 3, 1 / 3, 1 / 3, 0]).max() < 0.04


def test_min_p_of_one_keeps_the_best_tokens_only():
    drawn = draw(np.tile([1.0, 3.0, 3.0, 2.0], (256, 1)), inputs(256, seeds=np.arange(256), temperature=5.0, min_p=1.0))
    assert set(drawn.tolist()) == {1, 2}


ROWS, VOCABULARY = 3, 12
VALUES = st.sampled_from([0.0, -0.0, -0.5, -1.0, -1e-30, -20.0, -np.inf, np.nan]) | st.floats(-6, 0, width=32)
KEPT = jax.jit(kept)


@jax.jit
def kept_by_rank(scaled, parameters):
    """The definition by ranks: which of them pass every filter, sent back to the tokens."""
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(scaled.shape[1])[None, :]
    keep = rank < jnp.where(parameters.top_k > 0, parameters.top_k, scaled.shape[1])[:, None]
    probability = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    keep &= (before < parameters.top_p[:, None]) | (parameters.top_p[:, None] >= 1)
    keep &= probability >= parameters.min_p[:, None] * probability[:, :1]
    keep |= rank == 0
    return jnp.zeros(scaled.shape, bool).at[jnp.arange(scaled.shape[0])[:, None], order].set(keep), keep


@settings(max_examples=300, deadline=None)
@given(
    scaled=st.lists(VALUES, min_size=ROWS * VOCABULARY, max_size=ROWS * VOCABULARY),
    top_k=st.lists(st.integers(0, VOCABULARY + 1), min_size=ROWS, max_size=ROWS),
    top_p=st.lists(st.sampled_from([1.0, 0.5, 1e-9]) | st.floats(2.0**-20, 1, width=32), min_size=ROWS, max_size=ROWS),
    min_p=st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1, width=32), min_size=ROWS, max_size=ROWS),
)
def test_a_cutoff_keeps_exactly_the_tokens_that_pass_every_filter_by_rank(scaled, top_k, top_p, min_p):
    values = np.array(scaled, np.float32).reshape(ROWS, VOCABULARY)
    parameters = inputs(ROWS, top_k=top_k, top_p=top_p, min_p=min_p)
    expected, ranks = map(np.asarray, kept_by_rank(values, parameters))
    found = np.asarray(KEPT(values, parameters))
    # Of sums that round down again the definition by ranks keeps a rank after one that it dropped.
    runs = np.cumprod(ranks, axis=1).sum(axis=1)
    assert found.sum(axis=1).tolist() == runs.tolist()
    whole = runs == ranks.sum(axis=1)
    assert np.array_equal(found[whole], expected[whole])
    assert (found <= expected).all()


def test_a_cutoff_among_equals_keeps_the_smaller_ids():
    values = np.array([[-1.0, 0.0, -0.0, -1.0, 0.0, np.nan]], np.float32)
    for count, tokens in enumerate(([1], [1, 2], [1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 3, 4]), start=1):
        assert np.flatnonzero(np.asarray(kept(jnp.asarray(values), inputs(1, top_k=count)))[0]).tolist() == tokens
