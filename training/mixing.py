"""Stream mixes with a derivative that is one kernel on a GPU: a row's alternations and their reverse in registers.

To a compiler the normalization and its derivative are hundreds of tiny operations a sublayer.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.stream_mixes import triton
from pallas_kernels.stream_mixes.vectors import coefficients
from pallas_kernels.stream_mixes.xla import projections
from v41jax.config import TextConfig
from v41jax.layers import hyper_connections
from v41jax.layers.hyper_connections import Mixes, MixWeights

Array = jax.Array

ROWS = 32
"""Rows of one program, a warp."""


def mixes(streams: Array, weights: MixWeights, text: TextConfig) -> Mixes:
    """`hyper_connections.mixes`, differentiable; through kernels where the default device is a GPU."""
    target = backend.current_target()
    if target.route != "triton" or target.interpret:
        return hyper_connections.mixes(streams, weights, text, "xla")
    count = streams.shape[1]
    scale = jnp.repeat(weights.scale, jnp.array([count, count, count**2]), total_repeat_length=2 * count + count**2)
    logits = projections(streams, weights.fn, text.rms_norm_eps) * scale + weights.base
    return Mixes(*normalized(logits, count, text.hc_sinkhorn_iters, text.hc_eps))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def normalized(
    logits: Array, streams: int, iterations: int, epsilon: float, interpret: bool = False
) -> tuple[Array, Array, Array]:
    """The coefficients of scaled and shifted projections.

    Args:
      logits: [N, 2 S + S^2] float32.
      streams: S.
      iterations, epsilon: of the normalization.
      interpret: run the kernels as plain JAX operations.

    Returns:
      pre [N, S], post [N, S] and combination [N, S, S], float32.
    """
    width = logits.shape[1]
    return triton.coefficients(
        logits,
        jnp.zeros(width, jnp.float32),
        jnp.ones(3, jnp.float32),
        streams=streams,
        iterations=iterations,
        epsilon=epsilon,
        interpret=interpret,
    )


def _forward(logits: Array, streams: int, iterations: int, epsilon: float, interpret: bool):
    return normalized(logits, streams, iterations, epsilon, interpret), logits


def _backward(
    streams: int, iterations: int, epsilon: float, interpret: bool, logits: Array, cotangents: tuple[Array, ...]
) -> tuple[Array]:
    count, width = logits.shape
    pre, post, combination = cotangents
    joined = jnp.concatenate([pre, post, combination.reshape(count, -1)], axis=1)
    language = backend.triton()

    def kernel(logits_ref, cotangent_ref, result_ref):
        row = pl.program_id(0) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
        live = row < count
        near = jnp.where(live, row, 0)
        values = [language.load(logits_ref.at[near, place]) for place in range(width)]
        wanted = [language.load(cotangent_ref.at[near, place]) for place in range(width)]

        def forward(*z: Array) -> list[Array]:
            base, scale = [0.0] * width, [1.0] * 3
            return coefficients(z, base, scale, streams=streams, iterations=iterations, epsilon=epsilon, unrolled=True)

        _, reverse = jax.vjp(forward, *values)
        far = jnp.where(live, row, count)
        for place, value in enumerate(reverse(wanted)):
            language.store(result_ref.at[far, place], value, mask=live)

    call = backend.triton_call(
        kernel,
        jax.ShapeDtypeStruct((count, width), jnp.float32),
        grid=(-(-count // ROWS),),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        name="stream_mixes_reverse",
    )
    return (call(logits, joined),)


normalized.defvjp(_forward, _backward)
