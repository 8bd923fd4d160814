"""Normalizes, rotates, quantizes and stores index keys in the paged plane, in place."""

from __future__ import annotations

import jax

from pallas_kernels import backend
from pallas_kernels.index_key_write import tpu, triton, xla
from pallas_kernels.index_plane import logical_plane, plane_faults
from pallas_kernels.plane_layouts import in_lanes, to_lanes

Array = jax.Array


def index_key_write(
    keys: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    requests: Array,
    entries: Array,
    block_tables: Array,
    values: Array,
    scales: Array | None,
    *,
    epsilon: float,
    index_format: str,
    implementation: str = "auto",
) -> tuple[Array, Array | None]:
    """Stores `quantize(rope(rms_norm(key)))` at each key's entry; every other byte of the plane stays.

    Norm and rotation are rounded to the dtype of `keys`, whatever the plane's format, so that the key that is
    quantized is the same for all of them. No two live keys name the same entry.

    Args:
      keys: [C, I] activation dtype, the latents' projections by `wk`.
      norm: [I] weight of the norm.
      cos, sin: [C, dr / 2] float32 at the position of each group's first token.
      requests: [C] int32 batch position; -1 writes nothing.
      entries: [C] int32 entry id, `position // ratio`.
      block_tables: [R, P] int32 page ids.
      values, scales: one owner's plane as `index_scores` reads it; donate them, or XLA copies them first.
      epsilon: added to the mean square.
      index_format: "float", "fp8" or "fp4".
      implementation: "xla", "pallas" or "auto".

    Returns:
      values, scales.

    Raises:
      ValueError: arrays that do not fit `index_format`, all faults in one message.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: kernel chapter, "Key write: norm + RoPE + quantize + store"; model specification, "Indexer".
    """
    faults = plane_faults(keys.shape[-1], values, scales, index_format)
    if 2 * cos.shape[-1] > keys.shape[-1]:
        faults.append(f"{2 * cos.shape[-1]} rotated dimensions do not fit keys of width {keys.shape[-1]}")
    if faults:
        raise ValueError("index_key_write: " + "; ".join(faults))
    choice = backend.choose(
        "index_key_write",
        implementation,
        {
            "triton": backend.Candidate(triton.unsupported(keys, index_format)),
            "tpu": backend.Candidate(tpu.unsupported(keys, values, scales, index_format)),
        },
    )
    operands = (keys, norm, cos, sin, requests, entries, block_tables)
    options = {"epsilon": epsilon, "index_format": index_format}
    if choice.implementation == "tpu":
        return tpu.index_key_write(*operands, values, scales, **options, interpret=choice.interpret)
    plane = logical_plane(keys.shape[-1], values, scales, index_format)
    if choice.implementation == "triton":
        stored = triton.index_key_write(*operands, *plane, **options, interpret=choice.interpret)
    else:
        stored = xla.index_key_write(*operands, *plane, **options)
    return to_lanes(*stored, index_format) if in_lanes(keys.shape[-1], values, scales, index_format) else stored
