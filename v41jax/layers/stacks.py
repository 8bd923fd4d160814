"""Weights that stay in the stack of their run, because a slice in front of a kernel would be a launch or a copy."""

from __future__ import annotations

from typing import NamedTuple

import jax

Array = jax.Array


class OfRun(NamedTuple):
    """The weight of one layer, in the stack of its run.

    Attributes:
      values: [layers, ...].
      layer: int32 scalar, which layer of the run.
    """

    values: Array
    layer: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the layer's weight."""
        return self.values.shape[1:]


def stack_and_layer(weight: Array | OfRun) -> tuple[Array, Array | None]:
    """A weight as operations take it: the array and None, or the stack and the layer."""
    return (weight.values, weight.layer) if isinstance(weight, OfRun) else (weight, None)


def weight_of(weight: Array | OfRun) -> Array:
    """The weight alone, sliced out of a stack."""
    if isinstance(weight, OfRun):
        return jax.lax.dynamic_index_in_dim(weight.values, weight.layer, keepdims=False)
    return weight
