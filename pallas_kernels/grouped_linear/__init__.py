"""A linear of several groups, each with a bfloat16 weight of its own: the low-rank half of the output projection."""

from __future__ import annotations

import jax
from jax import lax

from pallas_kernels import backend
from pallas_kernels.grouped_linear import triton, xla

__all__ = ["grouped_linear", "reads_run"]

Array = jax.Array


def grouped_linear(x: Array, weight: Array, *, layer: Array | int | None = None, implementation: str = "auto") -> Array:
    """y[n, g] = x[n, g] @ weight[g].T in float32, left in parts for `quantized_rows.summed_rows`.

    XLA's GPU backend copies a layer's slice of a run in front of a product of several rows, which takes twice as long
    as the product reads it, and may lay out a whole run anew for a product of one row whose reader is a kernel. The
    kernel reads the run where it lies. XLA on a TPU has no such copy, and no kernel is needed.

    Args:
      x: [N, G, I] activation dtype.
      weight: [G, O, I], any float dtype.
      layer: int32 scalar or int; weight then is [layers, G, O, I].
      implementation: "auto", "xla" or "pallas".

    Returns:
      [P, N, G O] float32, whose sum over P rounded to the activation dtype is the product; or the product, P = 1.

    Raises:
      ValueError: shapes that do not fit each other, or an unknown implementation.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: model specification, "Attention".
    """
    *stack, groups, _, inputs = weight.shape
    if x.shape[1:] != (groups, inputs) or len(stack) != (layer is not None):
        raise ValueError(f"grouped_linear of x {x.shape} with layer {layer} got a weight {weight.shape}")
    choice = _choose(x, weight, implementation)
    if choice.implementation == "triton" and len(x):
        return triton.grouped_linear(x, weight, layer, interpret=choice.interpret)
    if layer is not None:
        weight = lax.dynamic_index_in_dim(weight, layer, keepdims=False)
    return xla.grouped_linear(x, weight)


def reads_run(x: Array, weight: Array, *, implementation: str = "auto") -> bool:
    """Whether `grouped_linear` of these arguments is the kernel, which reads a run where it lies."""
    return bool(len(x)) and _choose(x, weight, implementation).implementation == "triton"


def _choose(x: Array, weight: Array, implementation: str) -> backend.Choice:
    if implementation == "pallas" and backend.current_target().route == "tpu":
        # Asking for kernels is no error where none is wanted.
        implementation = "auto"
    candidate = backend.Candidate(triton.unsupported(x, weight), triton.preferred(x.shape[0]))
    return backend.choose("grouped_linear", implementation, {"triton": candidate})
