"""The stored form of a stack of expert matrices."""

from __future__ import annotations

from typing import NamedTuple

import jax


class ExpertWeights(NamedTuple):
    """One matrix of every expert as the checkpoint stores it (model specification, "Scale naming and block rules").

    Attributes:
      packed: [E, O, K / 2] uint8, two E2M1 codes a byte, the low nibble is the even input dim.
      scales: [E, O, K / 32] uint8, E8M0 codes, one per 32 input dims.
    """

    packed: jax.Array
    scales: jax.Array
