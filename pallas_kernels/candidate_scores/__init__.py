"""Scores of query rows against the entries of their candidate blocks only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import backend
from pallas_kernels.candidate_scores import tpu, triton, xla
from pallas_kernels.index_plane import logical_plane, plane_faults
from pallas_kernels.index_scores.triton import unsupported

Array = jax.Array


def candidate_scores(
    query: Array,
    head_weights: Array,
    visible: Array,
    batch_ids: Array,
    block_tables: Array,
    values: Array,
    scales: Array | None,
    candidates: Array,
    *,
    block_size: int,
    index_format: str,
    quantize_query: bool = True,
    score_dtype: DTypeLike = jnp.float32,
    implementation: str = "auto",
) -> Array:
    """`index_scores` restricted to each row's candidate blocks; rows outside them are never read.

    Args:
      query, head_weights, visible, batch_ids, block_tables, values, scales: as for `index_scores`.
      candidates: [N, Nb] int32 block ids of the row's request, -1 for an empty place; block `b` is entries
        `b * block_size` to `(b + 1) * block_size - 1`.
      block_size: entries per block; a block may lie on several pages.
      index_format, quantize_query, score_dtype, implementation: as for `index_scores`.

    Returns:
      [N, Nb * block_size] float32. Column `c` is entry `candidates[c // block_size] * block_size + c % block_size`.
      Entries at or past `visible`, empty places and padding rows are -inf.

    Raises:
      ValueError: arrays that do not fit `index_format` or each other, all faults in one message.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: model specification, "Two-level candidates".
    """
    width = query.shape[-1]
    faults = plane_faults(width, values, scales, index_format)
    if block_size < 1:
        faults.append(f"block_size {block_size} must be at least 1")
    if candidates.ndim != 2 or candidates.shape[0] != query.shape[0]:
        faults.append(f"candidates are {candidates.shape}, not [{query.shape[0]}, Nb]")
    if faults:
        raise ValueError("candidate_scores: " + "; ".join(faults))
    shapes = (index_format, quantize_query, score_dtype)
    choice = backend.choose(
        "candidate_scores",
        implementation,
        {
            "triton": backend.Candidate(unsupported(query, *shapes)),
            "tpu": backend.Candidate(tpu.unsupported(query, values, scales, block_tables, block_size, *shapes)),
        },
    )
    operands = (query, head_weights.astype(jnp.float32), visible, batch_ids, block_tables)
    cut = {"block_size": block_size, "index_format": index_format}
    if choice.implementation == "tpu":
        return tpu.candidate_scores(*operands, values, scales, candidates, **cut, interpret=choice.interpret)
    plane = logical_plane(width, values, scales, index_format)
    if choice.implementation == "triton":
        return triton.candidate_scores(*operands, *plane, candidates, **cut, interpret=choice.interpret)
    return xla.candidate_scores(
        *operands, *plane, candidates, **cut, quantize_query=quantize_query, score_dtype=score_dtype
    )
