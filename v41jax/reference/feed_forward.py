"""Router, routed experts and the shared expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from v41jax.config import TextConfig
from v41jax.reference.numerics import Arithmetic, Float, sigmoid
from v41jax.reference.selection import best_first

Matrices = tuple[Float, Float, Float]
"""Gate w1 [F, D], down w2 [D, F], up w3 [F, D]."""

_SOFTPLUS_LINEAR_FROM = 20.0
_WEIGHT_FLOOR = 1e-20


class Mixture(NamedTuple):
    """Output of the mixture, [m, D], and its two parts before the one rounding."""

    output: Float
    routed: Float
    shared: Float


def router_scores(logits: Float, scoring: str) -> Float:
    """Unbiased expert scores, [m, E] (model specification, "MoE").

    Raises:
      ValueError: a scoring function that the model does not have.
    """
    if scoring == "sqrtsoftplus":
        soft = np.logaddexp(0.0, logits)
        return np.sqrt(np.where(logits > _SOFTPLUS_LINEAR_FROM, logits, soft))
    if scoring == "sigmoid":
        return sigmoid(logits)
    if scoring == "softmax":
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)
    raise ValueError(f"scoring_func is {scoring!r}, must be sqrtsoftplus, sigmoid or softmax")


def route(
    x: Float, gate: Float, bias: Float, bias_vl: Float, image_rows: NDArray[np.bool_], text: TextConfig
) -> tuple[Float, NDArray[np.int32], Float]:
    """Scores [m, E], chosen experts [m, k] int32 ascending, and their weights [m, k].

    Args:
      x: [m, D]; gate: [E, D]; bias, bias_vl: [E], the latter for rows in an image span.
    """
    scores = router_scores((x @ gate.T) / text.gate_temp, text.scoring_func)
    biased = scores + np.where(image_rows[:, None], bias_vl, bias)
    choices = np.sort(best_first(biased)[:, : text.num_experts_per_tok], axis=1)
    weights = np.take_along_axis(scores, choices, axis=1)
    if text.norm_topk_prob:
        weights = weights / (weights.sum(axis=1, keepdims=True) + _WEIGHT_FLOOR)
    return scores, choices.astype(np.int32), weights * text.routed_scaling_factor


def expert(
    quantized: Float, matrices: Matrices, weights: Float | None, limit: float, arithmetic: Arithmetic, site: str
) -> Float:
    """One expert on its rows, [rows, D]; routing weights [rows] go in before the rounding of the hidden values."""
    w1, w2, w3 = matrices
    gate = arithmetic.activation(quantized @ w1.T)
    up = arithmetic.activation(quantized @ w3.T)
    if limit > 0:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    hidden = gate * sigmoid(gate) * up
    if weights is not None:
        hidden = weights[:, None] * hidden
    hidden = arithmetic.q8(arithmetic.activation(hidden), f"{site}.hidden")
    return arithmetic.activation(hidden @ w2.T)


def mixture(
    x: Float,
    choices: NDArray[np.int32],
    weights: Float,
    experts: Callable[[int], Matrices],
    shared: Matrices,
    limit: float,
    arithmetic: Arithmetic,
    site: str,
) -> Mixture:
    """Routed experts in ascending id, then the shared one.

    Args:
      x: [m, D] normed input; experts: matrices of an expert id, asked only for chosen ones.
    """
    quantized = arithmetic.q8(x, f"{site}.ffn_input")
    routed = np.zeros_like(x)
    for chosen in np.unique(choices):
        rows, place = np.nonzero(choices == chosen)
        out = expert(
            quantized[rows],
            experts(int(chosen)),
            weights[rows, place],
            limit,
            arithmetic,
            f"{site}.experts.{chosen}",
        )
        routed[rows] += out
    unweighted = expert(quantized, shared, None, limit, arithmetic, f"{site}.shared_experts")
    return Mixture(arithmetic.activation(routed + unweighted), routed, unweighted)
