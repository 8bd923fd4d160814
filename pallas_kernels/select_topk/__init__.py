"""The k best entries of every row, in a total order."""

from __future__ import annotations

import jax

from pallas_kernels import backend
from pallas_kernels.select_topk import tpu, triton, xla

Array = jax.Array


def select_topk(
    scores: Array,
    visible: Array,
    k: int,
    *,
    candidates: Array | None = None,
    block_size: int | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array]:
    """Ids of the `k` best visible entries of every row, ascending.

    The order is total: higher score first, then smaller entry; -0.0 equals +0.0. NaN and -inf are never selected, so
    that a row gives exactly `min(visible, k)` entries while its scores are finite.

    Args:
      scores: [N, M] float32. Without `candidates` column `j` is entry `j`; with them column `c` is entry
        `candidates[c // block_size] * block_size + c % block_size`.
      visible: [N] int32; an entry at or past it is not selected whatever its column holds. Padding rows have 0.
      k: how many at most.
      candidates: [N, Nb] int32 ascending block ids, -1 for an empty place; M = Nb * block_size.
      block_size: entries per candidate block.
      implementation: "xla", "pallas" or "auto".

    Returns:
      entries [N, k] int32, ascending, then -1; counts [N] int32, how many of them are entries.

    Raises:
      ValueError: shapes that do not fit.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: kernel chapter, "Top-k 512, candidate blocks, restricted scoring"; model specification, "Indexer".
    """
    faults = []
    if scores.ndim != 2 or visible.shape != scores.shape[:1]:
        faults.append(f"scores are {scores.shape} and visible {visible.shape}, not [N, M] and [N]")
    if k < 1:
        faults.append(f"k is {k}, less than 1")
    if (candidates is None) != (block_size is None):
        faults.append("candidates and block_size come together")
    elif candidates is not None and scores.shape != (candidates.shape[0], candidates.shape[1] * (block_size or 0)):
        faults.append(f"scores are {scores.shape} for candidates {candidates.shape} of {block_size} entries")
    if faults:
        raise ValueError("select_topk: " + "; ".join(faults))
    choice = backend.choose(
        "select_topk",
        implementation,
        {
            "triton": backend.Candidate(triton.unsupported(*scores.shape, k)),
            "tpu": backend.Candidate(tpu.unsupported(scores.shape[1], k), scores.shape[1] >= tpu.LEAST_PREFERRED),
        },
    )
    selection = {"candidates": candidates, "block_size": block_size}
    if choice.implementation == "xla":
        return xla.select_topk(scores, visible, k, **selection)
    kernel = tpu if choice.implementation == "tpu" else triton
    return kernel.select_topk(scores, visible, k, **selection, interpret=choice.interpret)
