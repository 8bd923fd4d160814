"""Delayed hyper connections: mixing coefficients of the residual streams, collapse, and expand."""

from __future__ import annotations

import dataclasses

import numpy as np

from v41jax.config import TextConfig
from v41jax.reference.numerics import Arithmetic, Float, sigmoid


@dataclasses.dataclass(frozen=True)
class Mixes:
    """Coefficients of one sublayer: pre [m, S] (used by the NEXT one), post [m, S], combination [m, S, S].

    `combination[:, j, k]` carries source stream j to destination stream k.
    """

    pre: Float
    post: Float
    combination: Float


def identity_pre_mix(rows: int, streams: int) -> Float:
    """(1, 0, ..) for every row: the first sublayer reads stream 0; [rows, S]."""
    return np.tile(np.eye(1, streams), (rows, 1))


def sinkhorn(logits: Float, iterations: int, eps: float) -> Float:
    """[m, S, S] logits to nearly doubly stochastic ones; the softmax and the first column pass are iteration one."""
    exponentials = np.exp(logits - logits.max(axis=2, keepdims=True))
    c = exponentials / exponentials.sum(axis=2, keepdims=True) + eps
    c = c / (c.sum(axis=1, keepdims=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(axis=2, keepdims=True) + eps)
        c = c / (c.sum(axis=1, keepdims=True) + eps)
    return c


def split_mixes(z: Float, scale: Float, base: Float, streams: int, iterations: int, eps: float) -> Mixes:
    """Coefficients from the normalized projection z [m, S * (2 + S)]; scale [3], base [S * (2 + S)]."""
    pre, post, rest = z[:, :streams], z[:, streams : 2 * streams], z[:, 2 * streams :]
    logits = (rest * scale[2] + base[2 * streams :]).reshape(-1, streams, streams)
    return Mixes(
        pre=sigmoid(pre * scale[0] + base[:streams]) + eps,
        post=2.0 * sigmoid(post * scale[1] + base[streams : 2 * streams]),
        combination=sinkhorn(logits, iterations, eps),
    )


def mixes(streams: Float, fn: Float, scale: Float, base: Float, text: TextConfig) -> Mixes:
    """Coefficients from the current streams [m, S, D] (model specification, "Single-pass (delayed) mHC")."""
    flat = streams.reshape(streams.shape[0], -1)
    normalizer = 1.0 / np.sqrt(np.mean(flat * flat, axis=1, keepdims=True) + text.rms_norm_eps)
    z = (flat @ fn.T) * normalizer
    return split_mixes(z, scale, base, text.hc_mult, text.hc_sinkhorn_iters, text.hc_eps)


def collapse(streams: Float, pre: Float, arithmetic: Arithmetic) -> Float:
    """Weighted sum of the streams, [m, D]."""
    return arithmetic.activation(np.einsum("msd,ms->md", streams, pre))


def expand(y: Float, streams: Float, coefficients: Mixes, arithmetic: Arithmetic) -> Float:
    """A sublayer's output [m, D] put back into the streams, [m, S, D]."""
    carried = coefficients.combination.transpose(0, 2, 1) @ streams
    return arithmetic.activation(coefficients.post[:, :, None] * y[:, None, :] + carried)
