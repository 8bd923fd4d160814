"""Normalizes, rotates, quantizes and stores window keys in their rings, in place."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import backend
from pallas_kernels.window_key_write import triton, xla

__all__ = ["window_key_write"]

Array = jax.Array

WINDOW_FORMATS = ("bf16", "float", "fp8")


def window_key_write(
    latents: Array,
    norm: Array,
    cos: Array,
    sin: Array,
    written: Array,
    batch_ids: Array,
    positions: Array,
    slots: Array,
    ring_offset: Array | int,
    window: Array,
    *,
    epsilon: float,
    window_format: str,
    layer: Array | int | None = None,
    implementation: str = "auto",
) -> Array:
    """Stores `Q8(rope(rms_norm(latent)))` at each row's place in its ring; every other byte stays.

    Norm and rotation are rounded to the dtype of `latents`, whatever the format. No two written rows name the same
    place. For GPUs there is a kernel because the chain is four launches for a row of one kilobyte. There is none for
    TPUs, where it is part of one program and costs no launches; it was never timed there.

    Args:
      latents: [N, d] activation dtype, products with `wkv`.
      norm: [d] weight of the norm.
      cos, sin: [N, dr / 2] float32 at the rows' positions.
      written: [N] bool; a row that is False writes nothing.
      batch_ids: [N] int32 request of the row; read where `written`.
      positions: [N] int32.
      slots: [R] int32 slot of each request.
      ring_offset: first ring of the layer, int32 scalar or int.
      window: [rings, ring, row]; position q of a row goes to ring `ring_offset + slot`, row `q % ring`. "float" and
        "bf16" rows are d wide, of the activation dtype and bfloat16 (or uint16 that holds the bits), "fp8" rows uint8
        [d + d / 32]. Donate it, or XLA copies it first.
      epsilon: added to the mean square.
      window_format: "float" (no quantizer), "bf16" or "fp8".
      layer: int32 scalar or int; `norm` then has one more leading axis, layers, and the kernel reads this one in place.
      implementation: "auto", "xla" or "pallas".

    Returns:
      window.

    Raises:
      ValueError: arrays that do not fit each other, all faults in one message, or an unknown format or implementation.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: model specification, "Attention"; runtime chapter, "Packed pools".
    """
    width = latents.shape[-1]
    row = width + width // 32 if window_format == "fp8" else width
    faults = []
    if window_format not in WINDOW_FORMATS:
        faults.append(f"the format {window_format!r} is none of {', '.join(WINDOW_FORMATS)}")
    if norm.shape[-1] != width or norm.ndim != (1 if layer is None else 2):
        wanted = f"[{width}]" if layer is None else f"[layers, {width}]"
        faults.append(f"the norm has shape {norm.shape}, not {wanted}")
    if 2 * cos.shape[-1] > width:
        faults.append(f"{2 * cos.shape[-1]} rotated dimensions do not fit keys of width {width}")
    if window.ndim != 3 or window.shape[-1] < row:
        faults.append(f"rows of {row} do not fit a window of shape {window.shape}")
    if faults:
        raise ValueError("window_key_write: " + "; ".join(faults))
    choice = backend.choose(
        "window_key_write",
        implementation,
        {"triton": backend.Candidate(triton.unsupported(latents, window))},
    )
    run = {
        "xla": xla.window_key_write,
        "triton": functools.partial(triton.window_key_write, interpret=choice.interpret),
    }[choice.implementation]
    operands = (latents, norm, cos, sin, written, batch_ids, positions, slots, ring_offset, window)
    return run(*operands, epsilon=epsilon, window_format=window_format, layer=layer)
