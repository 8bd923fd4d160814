"""The routed experts of a few rows that choose nearly all of them: every expert on every row, three products in all.

A loop over experts reads each matrix through a slice, which is a copy, and starts three small products an expert. Where
the rows choose about as many experts as there are, the whole stacks are read anyway.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arithmetic import fake_q8
from pallas_kernels.grouped_experts.xla import activate
from pallas_kernels.rounding import round_to

Array = jax.Array

MOST_ROWS = 16
"""With more rows the products of unchosen pairs cost more than the loop."""


def pays(rows: int, chosen: int, experts: int) -> bool:
    """Whether few rows choose so many experts that most of the stack is read."""
    return 1 < rows <= MOST_ROWS and rows * chosen >= experts


def grouped_experts(
    x: Array,
    expert_ids: Array,
    weights: Array,
    w1: Array,
    w3: Array,
    w2: Array,
    *,
    swiglu_limit: float,
    quantize_hidden: bool,
    valid: Array,
) -> Array:
    """See `pallas_kernels.grouped_experts`; one layer's matrices of any float dtype."""
    experts, width = w1.shape[:2]
    rows, dtype = x.shape[0], x.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    def product(equation: str, values: Array, matrices: Array) -> Array:
        result = jnp.einsum(
            equation, values, matrices.astype(dtype), precision=precision, preferred_element_type=jnp.float32
        )
        return round_to(result, dtype)

    chose = (expert_ids[:, :, None] == jnp.arange(experts)) & valid[:, None, None]
    routing = jnp.sum(jnp.where(chose, weights[:, :, None], 0), axis=1).T
    gate, up = (
        product("nd,fd->nf", x, matrices.reshape(experts * width, -1)).reshape(rows, experts, width).swapaxes(0, 1)
        for matrices in (w1, w3)
    )
    hidden = activate(
        *(part.reshape(experts * rows, width) for part in (gate, up)), routing.reshape(-1), swiglu_limit, dtype
    )
    if quantize_hidden:
        hidden = fake_q8(hidden)
    outputs = product("enf,edf->end", hidden.reshape(experts, rows, width), w2).astype(jnp.float32)
    served = jnp.any(chose, axis=1).T
    total = jnp.zeros(outputs.shape[1:], jnp.float32)
    for expert in range(experts):
        total += jnp.where(served[expert, :, None], outputs[expert], 0)
    return total
