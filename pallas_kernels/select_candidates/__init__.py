"""The candidate blocks that later index sources score, chosen from the first source's scores."""

from __future__ import annotations

import jax

from pallas_kernels import backend
from pallas_kernels.select_candidates import tpu, triton, xla
from pallas_kernels.select_topk.tpu import LEAST_PREFERRED

Array = jax.Array


def select_candidates(
    scores: Array, visible: Array, num_blocks: int, block_size: int, *, implementation: str = "auto"
) -> Array:
    """Ids of the `num_blocks` best blocks of every row, ascending.

    A block's score is the largest score of its visible entries; the newest visible block, full or not, is always
    kept. Equal blocks: the smaller id. A block all of whose visible entries are NaN or -inf is not kept.

    Args:
      scores: [N, M] float32, column `j` is entry `j`.
      visible: [N] int32, at most M. Padding rows have 0.
      num_blocks: how many at most.
      block_size: entries per block; block `b` starts at entry `b * block_size`.
      implementation: "xla", "pallas" or "auto".

    Returns:
      [N, num_blocks] int32, ascending, then -1. Every visible block when there are at most `num_blocks` of them and
      their scores are finite.

    Raises:
      ValueError: shapes that do not fit.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: model specification, "Two-level candidates".
    """
    faults = []
    if scores.ndim != 2 or visible.shape != scores.shape[:1]:
        faults.append(f"scores are {scores.shape} and visible {visible.shape}, not [N, M] and [N]")
    if num_blocks < 1 or block_size < 1:
        faults.append(f"num_blocks {num_blocks} and block_size {block_size} must be at least 1")
    if faults:
        raise ValueError("select_candidates: " + "; ".join(faults))
    width = scores.shape[1]
    choice = backend.choose(
        "select_candidates",
        implementation,
        {
            "triton": backend.Candidate(triton.unsupported(*scores.shape, num_blocks, block_size)),
            "tpu": backend.Candidate(tpu.unsupported(width, num_blocks, block_size), width >= LEAST_PREFERRED),
        },
    )
    if choice.implementation == "xla":
        return xla.select_candidates(scores, visible, num_blocks, block_size)
    kernel = tpu if choice.implementation == "tpu" else triton
    return kernel.select_candidates(scores, visible, num_blocks, block_size, interpret=choice.interpret)
