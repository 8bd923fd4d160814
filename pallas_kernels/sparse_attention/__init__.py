"""Attention of every query row over its selected compressed rows and its sliding window."""

from __future__ import annotations

import functools

import jax
from jax import lax

from pallas_kernels import backend
from pallas_kernels.rotation import rotate
from pallas_kernels.sparse_attention import tpu, triton, xla

Array = jax.Array

MAIN_FORMATS = ("bf16", "float", "fp4")
WINDOW_FORMATS = ("bf16", "float", "fp8")


def sparse_attention(
    query: Array,
    sink: Array,
    selected: Array,
    selected_counts: Array,
    main: Array | None,
    block_tables: Array,
    batch_ids: Array,
    slots: Array,
    ring: Array,
    in_forward: Array,
    positions: Array,
    window_floor: Array,
    in_forward_from: Array,
    in_forward_row: Array,
    cos: Array,
    sin: Array,
    *,
    window: int,
    scale: float,
    main_format: str,
    window_format: str,
    ring_offset: Array | int = 0,
    layer: Array | int | None = None,
    rotate_query: bool = False,
    implementation: str = "auto",
) -> Array:
    """Shared-latent attention over selected rows plus window rows, with a sink, rotated back to position 0.

    Every row is key and value at once and is shared by all heads. A position that is both selected and in the window
    counts twice. Sources: model specification, "Attention"; kernel chapter, "Sparse attention"; runtime chapter,
    "Attention index lists" and "Packed pools".

    Letters: N query rows, R requests, H heads, d latent width, K selected entries, W = `window`, P page columns,
    dr rotated dims (the last ones of d), M rows computed in this forward.

    Args:
      query: [N, H, d] activation dtype (bfloat16 or float32), rotated unless `rotate_query`.
      sink: [H] float32, raw logits; not multiplied by `scale`, no value row.
      selected: [N, K] int32 compressed entry ids of the row's request; only the first `selected_counts` are read.
        K = 0 for layers with a window only.
      selected_counts: [N] int32, 0..K.
      main: [pages, rows, row] compressed rows of one owner; entry j of request b is row `j % rows` of page
        `block_tables[b, j // rows]`. "bf16": bfloat16, row = d. "float": activation dtype, row = d. "fp4": uint8,
        row = d/2 + d/16 (E2M1 values, low nibble first, then one E4M3 scale per 16). Packed rows may be longer, as
        `stored_rows.pad_to_lanes` makes them; the kernel for TPUs wants them so. None when K = 0.
      block_tables: [R, P] int32 page ids.
      batch_ids: [N] int32 position of the row's request in the batch; -1 for padding rows.
      slots: [R] int32 slot of each request.
      ring: [slots, ring, row] window rows of one layer; position q of slot s is `ring[s, q % ring]`. "bf16" and
        "float" as for `main`; "fp8": uint8, row = d + d/32 (E4M3 values, then one E8M0 scale per 32).
      in_forward: [M, d] activation dtype, window rows made by this forward; M = 0 when every window row is read
        from the ring.
      positions: [N] int32 absolute positions.
      window_floor: [N] int32; the window of a row at p is the positions max(floor, p - W + 1, 0) .. p.
      in_forward_from: [N] int32; window positions q at or after it are row `in_forward_row - (p - q)` of
        `in_forward`, earlier ones come from the ring. p + 1 when no row is in this forward.
      in_forward_row: [N] int32, the row's own index in `in_forward`.
      cos, sin: [N, dr / 2] float32, the angles of the row's position.
      window: W, in tokens.
      scale: multiplies the dot products (d ** -0.5 in this model).
      main_format: "bf16", "float" or "fp4".
      window_format: "bf16", "float" or "fp8".
      ring_offset: added to the slots, int32 scalar or int.
      layer: int32 scalar or int; `sink` then has one more leading axis, layers.
      rotate_query: the query is rotated here, by `cos` and `sin`, in float32 and rounded to the activation dtype.
      implementation: "auto", "xla" or "pallas".

    Returns:
      [N, H, d] activation dtype. Scores and sums are float32; probabilities are rounded to the activation dtype for
      the value product only; the quotient is rounded to the activation dtype, then rotated back in float32 and
      rounded again. Padding rows are zero. Nothing outside the listed rows is read into a result: unused memory may
      hold NaN.

    Raises:
      ValueError: for an unknown format or implementation.
      KernelUnsupportedError: "pallas" where no kernel runs.
    """
    if main_format not in MAIN_FORMATS or window_format not in WINDOW_FORMATS:
        raise ValueError(
            f"sparse_attention formats are main {MAIN_FORMATS} and window {WINDOW_FORMATS}, "
            f"not {main_format!r} and {window_format!r}"
        )
    choice = backend.choose(
        "sparse_attention",
        implementation,
        {
            "triton": backend.Candidate(triton.unsupported(query, main, ring, cos)),
            "tpu": backend.Candidate(tpu.unsupported(query, main, ring, selected, in_forward, window)),
        },
    )
    kernel = functools.partial(triton.sparse_attention, interpret=choice.interpret)
    if choice.implementation == "triton":
        kernel = functools.partial(kernel, ring_offset=ring_offset, layer=layer, rotate_query=rotate_query)
    else:
        sink = sink if layer is None else lax.dynamic_index_in_dim(sink, layer, keepdims=False)
        query = rotate(query, cos, sin) if rotate_query else query
        slots = slots + ring_offset
    run = {
        "xla": xla.sparse_attention,
        "triton": kernel,
        "tpu": functools.partial(tpu.sparse_attention, interpret=choice.interpret),
    }[choice.implementation]
    return run(
        query,
        sink,
        selected,
        selected_counts,
        main,
        block_tables,
        batch_ids,
        slots,
        ring,
        in_forward,
        positions,
        window_floor,
        in_forward_from,
        in_forward_row,
        cos,
        sin,
        window=window,
        scale=scale,
        main_format=main_format,
        window_format=window_format,
    )
