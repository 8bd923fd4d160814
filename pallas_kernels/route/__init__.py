"""Choice of experts from router logits: scores, biased top-k, ascending ids and weights."""

from __future__ import annotations

import functools

import jax

from pallas_kernels import backend
from pallas_kernels.route import triton, xla

__all__ = ["route"]

Array = jax.Array


def route(
    logits: Array,
    bias: Array,
    bias_vl: Array,
    image_rows: Array,
    *,
    chosen: int,
    temperature: float,
    normalize: bool,
    scale: float,
    layer: Array | int | None = None,
    implementation: str = "auto",
) -> tuple[Array, Array]:
    """score = sqrt(softplus(logit / temperature)); the `chosen` experts of largest score + bias, by ascending id.

    The larger biased score wins, then the smaller id; a NaN counts as -infinity. For GPUs there is a kernel because a
    sort, a slice and a second sort of a few numbers are five launches. There is none for TPUs, where the chain is part
    of one program and costs no launches; it was never timed there.

    Args:
      logits: [N, E] float32, products of the rows with the router's weight.
      bias, bias_vl: [E] float32, used for the choice only; `bias_vl` where `image_rows`.
      image_rows: [N] bool.
      chosen: k, experts of a row, 1 .. E.
      temperature: divides the logits.
      normalize: divide a row's scores by their sum.
      scale: multiplies the weights.
      layer: int32 scalar or int; the biases then have one more leading axis, layers, and the kernel reads this one in
        place, without a slice of it.
      implementation: "auto", "xla" or "pallas".

    Returns:
      ids [N, k] int32 and weights [N, k] float32 in the order of the ids.

    Raises:
      ValueError: arrays that do not fit each other, all faults in one message, or an unknown implementation.
      KernelUnsupportedError: "pallas" where no kernel runs.

    Source: model specification, "MoE"; kernel chapter, "Router".
    """
    experts = logits.shape[-1]
    faults = [
        f"{name} has shape {part.shape}, not {'[layers, E]' if layer is not None else '[E]'} with E = {experts}"
        for name, part in (("bias", bias), ("bias_vl", bias_vl))
        if part.shape[-1] != experts or part.ndim != (1 if layer is None else 2)
    ]
    if image_rows.shape != logits.shape[:1]:
        faults.append(f"image_rows has shape {image_rows.shape}, not {logits.shape[:1]}")
    if not 1 <= chosen <= experts:
        faults.append(f"{chosen} experts of {experts} cannot be chosen")
    if faults:
        raise ValueError("route: " + "; ".join(faults))
    choice = backend.choose("route", implementation, {"triton": backend.Candidate(triton.unsupported(logits, chosen))})
    run = {
        "xla": xla.route,
        "triton": functools.partial(triton.route, interpret=choice.interpret),
    }[choice.implementation if len(logits) else "xla"]
    options = {"chosen": chosen, "temperature": temperature, "normalize": normalize, "scale": scale, "layer": layer}
    return run(logits, bias, bias_vl, image_rows, **options)
