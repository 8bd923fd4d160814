"""Arguments that stay where they are in device memory from step to step.

XLA captures runs of kernels as CUDA graphs. The nodes of a graph hold addresses: when an argument lies elsewhere than
in the step before, the host writes every node that follows again, which takes longer than launching it and, in a decode
step of few rows, longer than the step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array


class StagedArguments:
    """Device arrays, by the program that reads them, whose contents are replaced in place."""

    def __init__(self) -> None:
        self._held: dict[Hashable, list[Array]] = {}

    def place(self, program: Hashable, arguments: Any) -> Any:
        """The arguments on the device, where the same program found its last ones.

        What was returned before for this program is gone.

        Args:
          program: any key; shapes and dtypes of its arguments never change.
          arguments: a pytree of NumPy or JAX arrays.
        """
        leaves, structure = jax.tree.flatten(arguments)
        held = self._held.get(program)
        self._held[program] = _copy(leaves) if held is None else _replace(held, leaves)
        return structure.unflatten(self._held[program])


@jax.jit
def _copy(given: Sequence[Array]) -> list[Array]:
    return [jnp.copy(leaf) for leaf in given]


@jax.jit(donate_argnums=0, keep_unused=True)
def _replace(held: Sequence[Array], given: Sequence[Array]) -> list[Array]:
    """`given` in the memory of `held`."""
    return [jnp.copy(leaf) for leaf in given]
