"""Scores of query rows against the paged index plane, read in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import backend
from pallas_kernels.index_plane import logical_plane, plane_faults
from pallas_kernels.index_scores import tpu, triton, xla

Array = jax.Array


def index_scores(
    query: Array,
    head_weights: Array,
    visible: Array,
    batch_ids: Array,
    block_tables: Array,
    values: Array,
    scales: Array | None,
    *,
    index_format: str,
    quantize_query: bool = True,
    score_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> Array:
    """Score `sum_h w_h max(0, q_h . k_j)` of every visible entry `j` of every query row.

    One call serves prefill, decode and verify rows: each row has its own bound and, through its request, its own page
    list. The query is handed over unrounded by any quantizer and is quantized here, once: Q4m for an fp4 plane,
    `Q_QRY8` for an fp8 plane, not at all for a float plane.

    Args:
      query: [N, Hi, I] activation dtype, after RoPE.
      head_weights: [N, Hi] float32, already times 1/sqrt(I Hi); may be negative.
      visible: [N] int32, entries the row may see; at most P * rows.
      batch_ids: [N] int32, the row's request; -1 is a padding row.
      block_tables: [R, P] int32 page ids; columns past a request's context hold any legal id.
      values: one owner's keys, [pages, rows, I] ("float": activation dtype; "fp8": uint8 E4M3 codes) or
        [pages, rows, I / 2] ("fp4": uint8, low nibble = even dimension).
      scales: None ("float"), [pages, rows] float32 ("fp8"), [pages, rows, I / 32] uint8 E8M0 ("fp4"). A packed plane
        may also be as `plane_layouts.to_lanes` gives it, which a TPU needs for pages of 64 rows.
      index_format: "float", "fp8" or "fp4".
      quantize_query: False takes the query as it is (no effect for "float", which has no grid).
      score_dtype: float32, or bfloat16 to round the dot, each product with a head weight and the sum, as the
        published code does.
      implementation: "xla", "pallas" or "auto".

    Returns:
      [N, P * rows] float32. Column `j` is entry `j` of the row's request; columns at or past `visible`, and every
      column of a padding row, are -inf. What lies in pages past the bound never changes a result, NaN included.

    Raises:
      ValueError: arrays that do not fit `index_format`, all faults in one message.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: kernel chapter, "Index scorer over the paged plane"; model specification, "Indexer".
    """
    faults = plane_faults(query.shape[-1], values, scales, index_format)
    if faults:
        raise ValueError("index_scores: " + "; ".join(faults))
    width = query.shape[-1]
    shapes = (index_format, quantize_query, score_dtype)
    choice = backend.choose(
        "index_scores",
        implementation,
        {
            "triton": backend.Candidate(triton.unsupported(query, *shapes)),
            "tpu": backend.Candidate(tpu.unsupported(query, values, scales, *shapes)),
        },
    )
    operands = (query, head_weights.astype(jnp.float32), visible, batch_ids, block_tables)
    if choice.implementation == "tpu":
        return tpu.index_scores(*operands, values, scales, index_format=index_format, interpret=choice.interpret)
    plane = logical_plane(width, values, scales, index_format)
    if choice.implementation == "triton":
        return triton.index_scores(*operands, *plane, index_format=index_format, interpret=choice.interpret)
    return xla.index_scores(
        *operands, *plane, index_format=index_format, quantize_query=quantize_query, score_dtype=score_dtype
    )
