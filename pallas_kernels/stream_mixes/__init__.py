"""Coefficients of hyper-connections from their projections: sigmoids and the Sinkhorn normalization."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import backend
from pallas_kernels.stream_mixes import tpu, triton, xla

__all__ = ["stream_mixes"]

Array = jax.Array


def stream_mixes(
    z: Array,
    base: Array,
    scale: Array,
    *,
    streams: int,
    iterations: int,
    epsilon: float,
    implementation: str = "auto",
) -> tuple[Array, Array, Array]:
    """pre = sigmoid(z s0 + b) + epsilon, post = 2 sigmoid(z s1 + b), combination = Sinkhorn(softmax(z s2 + b)).

    Twenty alternations over S x S numbers are hundreds of tiny operations to a compiler and one kernel here.

    Args:
      z: [N, 2 S + S^2] float32, normalized projections: of pre, post and the combination's rows.
      base: [2 S + S^2] float32.
      scale: [3] float32, of pre, post and combination.
      streams: S.
      iterations: of the normalization; the softmax and the first column pass count as the first.
      epsilon: added to pre, to the softmax and to every divisor.
      implementation: "auto", "xla" or "pallas".

    Returns:
      pre [N, S], post [N, S] and combination [N, S, S] (source stream, destination stream), float32.

    Raises:
      ValueError: arrays that do not fit S, or an unknown implementation.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: model specification, "Single-pass (delayed) mHC".
    """
    width = 2 * streams + streams**2
    if z.ndim != 2 or z.shape[1] != width or base.shape != (width,) or scale.shape != (3,):
        raise ValueError(
            f"stream_mixes over {streams} streams needs z [N, {width}], base [{width}] and scale [3]; "
            f"got {z.shape}, {base.shape} and {scale.shape}"
        )
    choice = backend.choose(
        "stream_mixes", implementation, {"triton": backend.Candidate(None), "tpu": backend.Candidate(None)}
    )
    run = {
        "xla": xla.stream_mixes,
        "triton": functools.partial(triton.stream_mixes, interpret=choice.interpret),
        "tpu": functools.partial(tpu.stream_mixes, interpret=choice.interpret),
    }[choice.implementation if len(z) else "xla"]
    return run(z, base, scale, streams=streams, iterations=iterations, epsilon=epsilon)
