"""Pieces of the objective: the router's balance and the windows out of a stream."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from training.attention import window_mask
from training.data import BEGIN
from training.objective import BALANCE_RATE, balance, sample, sample_cuts


def test_a_crowded_expert_is_asked_for_less_often() -> None:
    masters = {f"layers.0.ffn.gate.{name}": jnp.zeros(3) for name in ("bias", "bias_vl")}
    after = balance(masters, jnp.array([[6.0, 3.0, 0.0]]))
    for name in masters:
        np.testing.assert_allclose(after[name], [-BALANCE_RATE, 0.0, BALANCE_RATE])


def test_targets_follow_their_inputs() -> None:
    stream = jnp.arange(100, 400, dtype=jnp.uint16)
    inputs, targets = sample(stream, jax.random.PRNGKey(0), 8, 16)
    assert (np.asarray(inputs)[:, 0] == BEGIN).all()
    np.testing.assert_array_equal(inputs[:, 1:] + 1, targets[:, 1:])


def test_a_cut_hides_what_was_before_it() -> None:
    seen = np.asarray(window_mask(12, 4, jnp.array([0, 6], jnp.int32)))
    pairs = {(4 * block + row, 4 * (block - 1) + key) for block, row, key in zip(*np.nonzero(seen[1]))}
    assert (6, 6) in pairs and (7, 6) in pairs and (5, 2) in pairs and (5, 4) in pairs
    assert not {(6, 5), (7, 5), (8, 5)} & pairs
    assert seen[0].sum() == sum(min(position + 1, 4) for position in range(12))


def test_cuts_hit_their_share_of_the_sequences() -> None:
    cuts = sample_cuts(jax.random.PRNGKey(1), jnp.float32(0.5), 400, 64, 16)
    decoder, encoder = np.asarray(cuts.decoder), np.asarray(cuts.encoder)
    assert 140 < (decoder > 0).sum() < 260
    assert (encoder <= decoder).all()
    none = sample_cuts(jax.random.PRNGKey(1), jnp.float32(0.0), 400, 64, 16)
    assert not np.asarray(none.decoder).any()
