"""The Engram tables cut by rows over the memory of a mesh's chips, instead of mapped into each host's.

The same rows in the same stored codes as `checkpoints.engram_tables` gives: a chip answers for the ids it holds with
zeros elsewhere, and one sum over all chips puts the rows together. For hosts with too little memory for the tables and
slow disks; every look-up is a step of the devices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from v41jax.config import ModelConfig
from v41jax.layers.collectives import DATA, MODEL
from v41jax.parameters import Index, TensorSource

ROWS = PartitionSpec((DATA, MODEL))
"""Of the tables: rows over all chips."""


class EngramDeviceTables:
    """Tables of every Engram layer in device memory; a `RowSource` of `EngramLookup`.

    Attributes:
      rows: rows of each layer's table.
      arrays: codes and scales of each layer, cut by rows.
    """

    def __init__(self, checkpoint: TensorSource, mesh: Mesh):
        """Reads each chip's rows from an open checkpoint; the last chip's part is padded with zeros."""
        text = checkpoint.config.text
        self.rows = text.engram_num_embeddings
        self._mesh = mesh
        self.arrays = [
            tuple(
                _place(checkpoint.tensor(f"layers.{layer}.engram.embed.{part}"), mesh) for part in ("weight", "scale")
            )
            for layer in text.engram_layer_ids
        ]

    def gather(self, layer_ordinal: int, row_ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """As of `EngramTables`.

        Raises:
          IndexError: a row id outside the table, which means a wrong hash layout.
        """
        count = self.rows[layer_ordinal]
        unique, inverse = np.unique(np.asarray(row_ids), return_inverse=True)
        if unique.size and not 0 <= unique[0] <= unique[-1] < count:
            bad = unique[0] if unique[0] < 0 else unique[-1]
            raise IndexError(f"Engram row {bad} lies outside the {count} rows of table {layer_ordinal}")
        # A power of two of ids, so that few programs serve every step.
        wanted = np.zeros(1 << max(unique.size - 1, 0).bit_length(), np.int32)
        wanted[: unique.size] = unique
        codes, scales = self._look_up(self.arrays[layer_ordinal], wanted)
        return np.asarray(codes)[inverse], np.asarray(scales)[inverse]

    def close(self) -> None:
        """Lets go of the device memory."""
        self.arrays = []

    @functools.cached_property
    def _look_up(self) -> Any:
        def local(tables: tuple[jax.Array, ...], wanted: jax.Array) -> tuple[jax.Array, ...]:
            held = tables[0].shape[0]
            place = lax.axis_index(DATA) * lax.axis_size(MODEL) + lax.axis_index(MODEL)
            index = wanted - place * held
            mine = (index >= 0) & (index < held)
            rows = (jnp.where(mine[:, None], table[jnp.clip(index, 0, held - 1)], 0) for table in tables)
            return tuple(lax.psum(part, (DATA, MODEL)) for part in rows)

        whole = PartitionSpec()
        return jax.jit(
            jax.shard_map(local, mesh=self._mesh, in_specs=((ROWS, ROWS), whole), out_specs=whole, check_vma=False)
        )


def table_shapes(config: ModelConfig, chips: int) -> list[tuple[Any, Any]]:
    """Abstract `EngramDeviceTables.arrays` of a mesh of so many chips."""
    text = config.text

    def table(rows: int, columns: int) -> Any:
        return jax.ShapeDtypeStruct((_part(rows, chips) * chips, columns), np.uint8)

    width = text.engram_head_dim
    return [(table(rows, width), table(rows, width // 32)) for rows in text.engram_num_embeddings]


def _part(rows: int, chips: int) -> int:
    """Rows of one chip."""
    return -(-rows // chips)


def _place(table: np.ndarray, mesh: Mesh) -> jax.Array:
    codes = table.view(np.uint8)
    part = _part(len(codes), mesh.size)

    def rows(index: Index) -> np.ndarray:
        start, stop, _ = index[0].indices(part * mesh.size)
        out = np.zeros((stop - start, codes.shape[1]), np.uint8)
        held = codes[start:stop]
        out[: len(held)] = held
        return out

    return jax.make_array_from_callback((part * mesh.size, codes.shape[1]), NamedSharding(mesh, ROWS), rows)
