"""What `quantized_rows` returns."""

from __future__ import annotations

from typing import NamedTuple

import jax

Array = jax.Array


class QuantizedRows(NamedTuple):
    """Rows that linears read, [N, K] activation dtype each.

    Attributes:
      rounded: the rows before their Q8.
      quantized: after it; the same as `rounded` where activations are not quantized.
      lanes: `quantized` in the order in which the GPU kernel of `block_scaled_linear` reads it, padded with zeros to a
        multiple of 64 columns; None where XLA made the rows.
      codes: `quantized` as the GPU kernel of `grouped_experts` reads it (its `operand_of`); None where XLA made the
        rows or nobody asked.
    """

    rounded: Array
    quantized: Array
    lanes: Array | None = None
    codes: Array | None = None
