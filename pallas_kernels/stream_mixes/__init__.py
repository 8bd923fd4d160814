"""Coefficients of hyper-connections from the streams: projections, sigmoids and the Sinkhorn normalization."""

from __future__ import annotations

import functools

import jax
from jax import lax

from pallas_kernels import backend
from pallas_kernels.stream_mixes import tpu, triton, xla

__all__ = ["stream_mixes"]

Array = jax.Array


def stream_mixes(
    streams: Array,
    fn: Array,
    base: Array,
    scale: Array,
    *,
    iterations: int,
    epsilon: float,
    norm_epsilon: float,
    layer: Array | int | None = None,
    after: Array | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array, Array]:
    """pre = sigmoid(z s0 + b) + epsilon, post = 2 sigmoid(z s1 + b), combination = Sinkhorn(softmax(z s2 + b)).

    z = (x . fn^T) / sqrt(mean(x^2) + norm_epsilon) of the row x of all streams, in true float32. Twenty alternations
    over S x S numbers are hundreds of tiny operations to a compiler and one kernel here. On a GPU the projections of
    bfloat16 rows are a kernel too, which cuts the inner dimension among programs: it adds up in another order than XLA.
    A TPU leaves them to XLA, where no operation costs a launch.

    Args:
      streams: [N, S, D] activation dtype.
      fn: [2 S + S^2, S D] float32, rows of pre, post and the combination.
      base: [2 S + S^2] float32.
      scale: [3] float32, of pre, post and combination.
      iterations: of the normalization; the softmax and the first column pass count as the first.
      epsilon: added to pre, to the softmax and to every divisor.
      norm_epsilon: added to the mean square.
      layer: int32 scalar or int; fn, base and scale then have one more leading axis, layers, and the GPU kernels read
        this one in place.
      after: an array that is made before the GPU kernels start, see `backend.triton_call`; no other implementation
        waits for it.
      implementation: "auto", "xla" or "pallas".

    Returns:
      pre [N, S], post [N, S] and combination [N, S, S] (source stream, destination stream), float32.

    Raises:
      ValueError: arrays that do not fit each other, or an unknown implementation.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: model specification, "Single-pass (delayed) mHC".
    """
    rows, count, width = streams.shape
    outputs = 2 * count + count**2
    stack = fn.shape[: layer is not None]
    wanted = ((*stack, outputs, count * width), (*stack, outputs), (*stack, 3))
    if (fn.shape, base.shape, scale.shape) != wanted:
        raise ValueError(
            f"stream_mixes of streams {streams.shape} with layer {layer} needs fn, base and scale of {wanted}; "
            f"got {fn.shape}, {base.shape} and {scale.shape}"
        )
    choice = backend.choose(
        "stream_mixes", implementation, {"triton": backend.Candidate(None), "tpu": backend.Candidate(None)}
    )
    options = {"iterations": iterations, "epsilon": epsilon}
    if rows and choice.implementation == "triton" and triton.projects(streams):
        return triton.stream_mixes(
            streams, fn, base, scale, layer, after, norm_epsilon=norm_epsilon, interpret=choice.interpret, **options
        )
    if layer is not None:
        fn, base, scale = (lax.dynamic_index_in_dim(part, layer, keepdims=False) for part in (fn, base, scale))
    run = {
        "xla": xla.coefficients,
        "triton": functools.partial(triton.coefficients, interpret=choice.interpret),
        "tpu": functools.partial(tpu.coefficients, interpret=choice.interpret),
    }[choice.implementation if rows else "xla"]
    return run(xla.projections(streams, fn, norm_epsilon), base, scale, streams=count, **options)
