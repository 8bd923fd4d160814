"""Many small host arrays as one argument of a program.

Every array that a program takes from the host is a transfer of its own, which costs a GPU's host tens of microseconds
however small it is; a step has about thirty.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from scheduler.batch import BatchStep, EngramRows
from scheduler.pools import Pools
from v41jax.sampling import LogitEdits

if TYPE_CHECKING:
    from v41jax.runner import StepSampling

Array = jax.Array


class Leaf(NamedTuple):
    """shape, dtype: of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def words(self) -> int:
        """32-bit words it takes, one an element."""
        return math.prod(self.shape)


class Packing:
    """Where the arrays of a tree lie in one array of 32-bit words."""

    def __init__(self, tree: Any):
        """Args:
        tree: of arrays or of their shapes: int32, uint32, float32 or bool.

        Raises:
          TypeError: an array of another type.
        """
        leaves, self._structure = jax.tree.flatten(tree)
        self._leaves = [Leaf(tuple(leaf.shape), np.dtype(leaf.dtype)) for leaf in leaves]
        for leaf in self._leaves:
            if leaf.dtype != bool and (leaf.dtype.itemsize != 4 or leaf.dtype.kind not in "iuf"):
                raise TypeError(f"{leaf.dtype} is not packed: give arrays of 32-bit numbers or bool")
        ends = list(itertools.accumulate(leaf.words for leaf in self._leaves))
        self._spans = list(zip([0, *ends], ends, strict=False))
        self.words = ends[-1] if ends else 0

    def pack(self, tree: Any) -> np.ndarray:
        """int32 [words] of a tree of host arrays, shaped like the one this was made of.

        Raises:
          ValueError: another tree, or arrays of other shapes.
          TypeError: arrays of other types; they are never converted.
        """
        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure or any(
            np.shape(leaf) != wanted.shape for leaf, wanted in zip(leaves, self._leaves, strict=True)
        ):
            raise ValueError("the arrays are not those of the shapes that the packing was made of")
        packed = np.empty(self.words, np.int32)
        for leaf, wanted, (start, end) in zip(leaves, self._leaves, self._spans, strict=True):
            values = np.asarray(leaf).reshape(-1)
            if values.dtype != wanted.dtype:
                raise TypeError(f"an array of {values.dtype} where the packing was made of {wanted.dtype}")
            packed[start:end] = values if wanted.dtype == bool else values.view(np.int32)
        return packed

    def unpack(self, words: Array) -> Any:
        """The tree of what `pack` took, bit for bit; for use inside the program."""

        def part(leaf: Leaf, span: tuple[int, int]) -> Array:
            values = words[slice(*span)].reshape(leaf.shape)
            if leaf.dtype == bool:
                return values != 0
            return values if leaf.dtype == jnp.int32 else lax.bitcast_convert_type(values, leaf.dtype)

        return jax.tree.unflatten(self._structure, map(part, self._leaves, self._spans))


class StepPacking:
    """The arguments of a step with those that the host makes anew for every step packed into one."""

    def __init__(self, arguments: Sequence[Any]):
        """Args:
        arguments: (abstract) ones of `serve_step`.
        """
        weights, pools, adjustments, batch, engram_rows, sampling, *images = arguments
        self._packing = Packing(self._small(batch, sampling))
        words = jax.ShapeDtypeStruct((self._packing.words,), jnp.int32)
        self.abstract = (weights, pools, adjustments, words, engram_rows, sampling.edits, *images)

    @staticmethod
    def _small(batch: BatchStep, sampling: StepSampling) -> Any:
        # Edits that change nothing are on the device already, and those that do are large.
        return batch, sampling._replace(edits=None)

    def pack(self, batch: BatchStep, engram_rows: EngramRows, sampling: StepSampling, *images: Array) -> Sequence[Any]:
        """The program's arguments after weights, pools and adjustments."""
        words = self._packing.pack(self._small(batch, sampling))
        return words, engram_rows, sampling.edits, *images

    def unpack(
        self,
        weights: Any,
        pools: Pools,
        adjustments: Array,
        words: Array,
        engram_rows: EngramRows,
        edits: LogitEdits,
        *images: Array,
    ) -> Sequence[Any]:
        """The step function's arguments, inside the program."""
        batch, sampling = self._packing.unpack(words)
        return weights, pools, adjustments, batch, engram_rows, sampling._replace(edits=edits), *images
