"""What is minimized: batches out of a token stream, the target's loss, the baseline's, and the router's balance."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from training.backbone import Cuts, Narrowing, Setup, backbone, head
from training.baseline import BaselineConfig, baseline_logits
from training.data import BEGIN
from training.hashing import HashTables
from training.optimizer import TrainState, update
from training.weights import Masters, serving_weights
from v41jax.layers.rope import RopeTable

Array = jax.Array

BALANCE_RATE = 1e-3
"""Step of a router bias towards equal load."""


class Constants(NamedTuple):
    """Arrays that no step changes.

    Attributes:
      stream: [n] uint16 token ids.
      tables: Engram hash constants.
      plain, yarn: RoPE tables.
    """

    stream: Array
    tables: HashTables
    plain: RopeTable
    yarn: RopeTable


class Schedule(NamedTuple):
    """What the host sets for some steps; scalars.

    Attributes:
      rate: float32 learning rate.
      topk, blocks: int32 selection sizes.
      replay: float32 share of sequences whose windows are rebuilt somewhere.
    """

    rate: Array
    topk: Array
    blocks: Array
    replay: Array


def sample(stream: Array, key: Array, batch: int, length: int) -> tuple[Array, Array]:
    """Windows at random places: inputs and what follows each, [B, L] int32; the first input begins a sentence."""
    starts = jax.random.randint(key, (batch, 1), 0, stream.shape[0] - length)
    ids = stream[starts + jnp.arange(length + 1)].astype(jnp.int32)
    return ids[:, :length].at[:, 0].set(BEGIN), ids[:, 1:]


def sample_cuts(key: Array, share: Array, batch: int, length: int, window: int) -> Cuts:
    """Rebuilt windows: the decoder's of `share` of the sequences, the encoder's of half of those, earlier."""
    which, encoder, place, before = jax.random.split(key, 4)
    decoder = jax.random.randint(place, (batch,), window, length)
    earlier = jnp.maximum(decoder - jax.random.randint(before, (batch,), 0, 2 * window), 0)
    cut = jax.random.uniform(which, (batch,)) < share
    both = cut & (jax.random.uniform(encoder, (batch,)) < 0.5)
    return Cuts(jnp.where(both, earlier, 0), jnp.where(cut, decoder, 0))


def cross_entropy(logits: Array, targets: Array) -> Array:
    """Nats of every target, shape of `targets`."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def balance(masters: Masters, counts: Array) -> Masters:
    """Router biases after a step: up where an expert got less than its share of rows, down where it got more.

    Args:
      masters: with `layers.{n}.ffn.gate.bias`.
      counts: [layers, E] float32.
    """
    masters = dict(masters)
    for layer in range(counts.shape[0]):
        name = f"layers.{layer}.ffn.gate.bias"
        bias = masters[name] + BALANCE_RATE * jnp.sign(jnp.mean(counts[layer]) - counts[layer])
        masters[name], masters[f"{name}_vl"] = bias, bias
    return masters


def target_step(
    state: TrainState, constants: Constants, schedule: Schedule, *, setup: Setup, batch: int, length: int
) -> tuple[TrainState, Array]:
    """One step of the target; the metrics are [loss, index loss, largest load over mean load] float32."""
    config = setup.config
    key = jax.random.fold_in(state.key, state.step)
    place, cut, some = jax.random.split(key, 3)
    inputs, targets = sample(constants.stream, place, batch, length)
    cuts = sample_cuts(cut, schedule.replay, batch, length, config.text.sliding_window)
    offset = jax.random.randint(some, (), 0, 4)

    def loss(masters: Masters) -> tuple[Array, tuple[Array, Array, Array]]:
        weights = serving_weights(masters, config, ("text",), setup.precision.activation_dtype)
        output = backbone(
            weights,
            constants.tables,
            constants.plain,
            constants.yarn,
            inputs,
            Narrowing(schedule.topk, schedule.blocks),
            cuts,
            offset,
            setup=setup,
        )
        nats = jnp.mean(cross_entropy(head(weights, output.hidden), targets))
        return nats + output.index_loss, (nats, output.index_loss, output.counts)

    gradients, (nats, index_loss, counts) = jax.grad(loss, has_aux=True)(state.masters)
    state = update(state, gradients, schedule.rate)
    state = state._replace(masters=balance(state.masters, counts))
    load = jnp.mean(jnp.max(counts, axis=1) / jnp.mean(counts, axis=1))
    return state, jnp.stack([nats, index_loss, load])


def baseline_step(
    state: TrainState,
    constants: Constants,
    schedule: Schedule,
    *,
    config: BaselineConfig,
    batch: int,
    length: int,
) -> tuple[TrainState, Array]:
    """One step of the dense baseline; metrics as of `target_step`, zeros where it has none."""
    place, _, _ = jax.random.split(jax.random.fold_in(state.key, state.step), 3)
    inputs, targets = sample(constants.stream, place, batch, length)

    def loss(masters: Masters) -> Array:
        return jnp.mean(cross_entropy(baseline_logits(masters, constants.plain, inputs, config), targets))

    nats, gradients = jax.value_and_grad(loss)(state.masters)
    return update(state, gradients, schedule.rate), jnp.stack([nats, jnp.zeros(()), jnp.zeros(())])
