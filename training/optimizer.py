"""One optimizer for everything that is trained: clipped AdamW, with a rate that the host sets from the clock."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from training.weights import Masters, is_state

Array = jax.Array

WEIGHT_DECAY = 0.1
TABLE_FACTOR = 4.0
"""Engram tables learn faster: a row is read once in thousands of tokens."""


class TrainState(NamedTuple):
    """Everything a phase carries on.

    Attributes:
      masters: float32.
      moments: of the optimizer.
      step: int32 scalar.
      key: random key data, uint32.
    """

    masters: Masters
    moments: Any
    step: Array
    key: Array


def transformation() -> optax.GradientTransformation:
    """Clipping and Adam; decay and rate are applied in `update`."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-10))


def start(masters: Masters, seed: int) -> TrainState:
    """A state before the first step; router biases get no moments."""
    return TrainState(
        masters, transformation().init(_learned(masters)), jnp.zeros((), jnp.int32), jax.random.PRNGKey(seed)
    )


def _learned(masters: Masters) -> Masters:
    return {name: master for name, master in masters.items() if not is_state(name)}


def update(state: TrainState, gradients: Masters, rate: Array) -> TrainState:
    """One step; router biases stay as they are, and a gradient that is not finite counts as zero."""
    learned = _learned(state.masters)
    finite = jnp.isfinite(optax.global_norm(_learned(gradients)))
    gradients = jax.tree.map(lambda gradient: jnp.where(finite, gradient, 0.0), gradients)
    steps, moments = transformation().update(_learned(gradients), state.moments, learned)
    masters = dict(state.masters)
    for name, step in steps.items():
        master = learned[name]
        decay = WEIGHT_DECAY if _decays(name, master) else 0.0
        factor = TABLE_FACTOR if "engram.embed" in name else 1.0
        masters[name] = master - rate * factor * (step + decay * master)
    return TrainState(masters, moments, state.step + 1, state.key)


def _decays(name: str, master: Array) -> bool:
    """Matrices decay, but for embeddings, tables and the mixes."""
    return (
        master.ndim >= 2 and "embed" not in name and "hc_" not in name and not name.endswith(("q_weight", "k_weight"))
    )
