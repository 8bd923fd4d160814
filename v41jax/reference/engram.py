"""The Engram update of the residual streams from fetched table rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from v41jax.reference.numerics import Arithmetic, Float, sigmoid

_GATE_FLOOR = 1e-6


def gates(streams: Float, keys: Float, gate_weights: Float, eps: float) -> Float:
    """How much of the value each stream takes, [m, S].

    Args:
      streams: [m, S, D]; keys: [m, S, D]; gate_weights: [S, D], the product of the two stored weights.

    Source: Engram specification, "Layer arithmetic".
    """
    normalizer = 1.0 / np.sqrt(np.mean(streams * streams, axis=2) + eps)
    normalizer = normalizer / np.sqrt(np.mean(keys * keys, axis=2) + eps)
    dot = (streams * gate_weights * keys).sum(axis=2) * normalizer * streams.shape[2] ** -0.5
    return sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), _GATE_FLOOR)), dot))


def update(
    streams: Float,
    rows: Float,
    dead: NDArray[np.bool_],
    wkv: Float,
    gate_weights: Float,
    eps: float,
    arithmetic: Arithmetic,
    site: str,
) -> tuple[Float, Float]:
    """The streams after the update, and the gates; rows marked dead keep their streams to the bit.

    Args:
      streams: [m, S, D]; rows: [m, columns * head_dim] dequantized; dead: [m] bool.
      wkv: [(S + 1) * D, columns * head_dim], stream keys first, the value last.
    """
    m, count, width = streams.shape
    projected = arithmetic.activation(arithmetic.q8(rows, f"{site}.rows") @ wkv.T)
    keys, value = projected[:, : count * width].reshape(m, count, width), projected[:, count * width :]
    gate = np.where(dead[:, None], 0.0, gates(streams, keys, gate_weights, eps))
    updated = arithmetic.activation(streams + gate[:, :, None] * value[:, None, :])
    return np.where(dead[:, None, None], streams, updated), gate
