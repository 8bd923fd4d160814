"""The packed forms of a stack of expert matrices."""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

Order = Literal["released", "arranged"]
"""Of the codes of a packed matrix: as the checkpoint has them, or as `arrangement` puts them for the GPU kernels."""


class ExpertWeights(NamedTuple):
    """One packed matrix of every expert (model specification, "Scale naming and block rules").

    Attributes:
      packed: [E, O, K / 2] uint8 as the checkpoint stores it, two E2M1 codes a byte, the low nibble is the even input
        dim; or [E, O, K / 4] uint16, `arrangement.arranged` of that.
      scales: [E, O, K / 32] uint8, E8M0 codes, one per 32 input dims.
    """

    packed: jax.Array
    scales: jax.Array

    @property
    def order(self) -> Order:
        """Of the codes, which the dtype tells."""
        return order_of(self.packed)

    @property
    def inputs(self) -> int:
        """Input dims, K."""
        return 2 * self.packed.dtype.itemsize * self.packed.shape[-1]


def order_of(packed: jax.Array) -> Order:
    """The order of the codes of `ExpertWeights.packed`."""
    return "arranged" if packed.dtype == jnp.uint16 else "released"
