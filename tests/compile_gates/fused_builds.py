"""The small operations that have no kernel, at production shapes, with the bytes they cannot avoid.

XLA compiles them; the report compares what it expects to read and write with these bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from scheduler.batch import CompressionPlan
from tests.compile_gates.index_builds import Build, shape
from tests.compile_gates.tpu import shape_bytes
from v41jax.layers import compressor, hyper_connections, moe
from v41jax.layers.norm import rms_norm
from v41jax.layers.rows import Requests
from v41jax.presets import preset

TEXT = preset("v4.1-flash").text
STREAMS, RING_C, SLOTS, COLUMNS = 4, 2, 63, 1024
ROWS = (1, 64, 4096)


@dataclasses.dataclass(frozen=True)
class FusedBuild(Build):
    """A function that XLA compiles alone.

    Attributes:
      least_bytes: of its arguments and results that one pass reads and writes.
    """

    least_bytes: int = 0


def seam(
    output: jax.Array,
    streams: jax.Array,
    coefficients: hyper_connections.Mixes,
    weights: hyper_connections.MixWeights,
    norm: jax.Array,
) -> tuple:
    """From one sublayer's output to the next one's input and coefficients."""
    streams = hyper_connections.expand(output, streams, coefficients)
    inputs = rms_norm(hyper_connections.collapse(streams, coefficients.pre), norm, TEXT.rms_norm_eps)
    return streams, inputs, hyper_connections.mixes(streams, weights, TEXT, "xla")


def seam_arguments(rows: int) -> tuple:
    """Operands of `seam`."""
    wide = 2 * STREAMS + STREAMS**2
    return (
        shape((rows, TEXT.hidden_size), jnp.bfloat16),
        shape((rows, STREAMS, TEXT.hidden_size), jnp.bfloat16),
        hyper_connections.Mixes(
            *(shape((rows, *rest), jnp.float32) for rest in ((STREAMS,), (STREAMS,), (STREAMS, STREAMS)))
        ),
        hyper_connections.MixWeights(
            shape((wide, STREAMS * TEXT.hidden_size), jnp.float32),
            shape((wide,), jnp.float32),
            shape((3,), jnp.float32),
        ),
        shape((TEXT.hidden_size,), jnp.bfloat16),
    )


def router_arguments(rows: int) -> tuple:
    """Operands of `moe.route` up to its configuration."""
    experts = TEXT.n_routed_experts
    return (
        shape((rows, TEXT.hidden_size), jnp.bfloat16),
        moe.RouterWeights(
            shape((experts, TEXT.hidden_size), jnp.bfloat16), *[shape((experts,), jnp.float32) for _ in range(2)]
        ),
        shape((rows,), jnp.bool_),
    )


def pooled(normalized: jax.Array, weights: Any, memory: Any, plan: CompressionPlan, requests: Requests) -> tuple:
    """Ratio-2 latents and the tails, without the writes to pages."""
    latent, memory = compressor._latents(normalized, weights, memory._replace(tail=0), plan, requests, 2, TEXT)
    return latent, memory.tail_kv, memory.tail_score


def pooling_arguments(rows: int) -> tuple:
    """Operands of `pooled`: half of the rows close a group."""
    width, closing, tails = TEXT.head_dim, max(1, rows // 2), min(rows, SLOTS)
    integers = [shape((count,), jnp.int32) for count in (closing,) * 4 + (tails,) * 3]
    tail = shape((1, SLOTS, RING_C, width), jnp.float32)
    return (
        shape((rows, TEXT.hidden_size), jnp.bfloat16),
        compressor.CompressorWeights(
            *[shape((width, TEXT.hidden_size), jnp.bfloat16) for _ in range(2)],
            shape((width,), jnp.bfloat16),
            None,
            None,
        ),
        compressor.OwnerMemory(None, None, None, tail, tail, None),
        CompressionPlan(*integers),
        Requests(shape((SLOTS,), jnp.int32), shape((SLOTS, COLUMNS), jnp.int32)),
    )


def fused_builds() -> Iterator[FusedBuild]:
    """Every operation that is left to XLA."""
    for rows in ROWS:
        for name, function, arguments in (
            ("mHC seam", seam, seam_arguments(rows)),
            ("router", functools.partial(moe.route, text=TEXT), router_arguments(rows)),
            ("ratio-2 pooling", pooled, pooling_arguments(rows)),
        ):
            moved = jax.tree.leaves((arguments, jax.eval_shape(function, *arguments)))
            # Tables and tails are touched in a few rows only.
            least = sum(shape_bytes(x) for x in moved if x.shape[:1] != (SLOTS,))
            yield FusedBuild(f"{name} {rows} rows", function, arguments, least_bytes=least)
