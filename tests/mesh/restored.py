"""Restores a conversion onto two meshes and compares every part with a load of the released files.

`python -m tests.mesh.restored CHECKPOINT OUT`, with eight devices; prints the weights compared and how many of them are
cut over more than one device. The Engram tables in device memory are compared with the mapped ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from checkpoints.engram_tables import EngramTables
from checkpoints.load import Checkpoint
from checkpoints.orbax_store import convert, restore
from v41jax.engram_device_tables import EngramDeviceTables
from v41jax.layers.collectives import Parallel
from v41jax.mesh_runner import load_on_mesh
from v41jax.sharding import make_mesh

TABLE_MESH = Parallel(2, 4)
MESHES = (Parallel(2, 4, "data_model"), Parallel(1, 8, "intermediate"))
MAX_LEN = 32


def same_parts(one: jax.Array, other: jax.Array) -> bool:
    """Every device holds the same bytes of the same part."""
    parts = zip(one.addressable_shards, other.addressable_shards, strict=True)
    return all(
        a.index == b.index
        and np.array_equal(np.asarray(a.data).view(np.uint8), np.asarray(b.data).view(np.uint8))
        and a.data.dtype == b.data.dtype
        for a, b in parts
    )


def compare_tables(source: Path) -> int:
    """Rows of the Engram tables that are the same from device memory and from the files."""
    random, rows = np.random.default_rng(0), 0
    with Checkpoint.open(source) as checkpoint, EngramTables.open(checkpoint) as files:
        tables = EngramDeviceTables(checkpoint, make_mesh(TABLE_MESH))
        for layer, count in enumerate(tables.rows):
            ids = np.concatenate([[0, count - 1, count - 1], random.integers(0, count, 40)])
            for one, other in zip(tables.gather(layer, ids), files.gather(layer, ids), strict=True):
                assert one.dtype == other.dtype and np.array_equal(one, other)
            rows += len(ids)
    return rows


def main() -> None:
    source, out = map(Path, sys.argv[1:])
    convert(source, out)
    compared = cut = 0
    for parallel in MESHES:
        with Checkpoint.open(source) as checkpoint:
            expected = load_on_mesh(
                checkpoint,
                make_mesh(parallel),
                parallel,
                max_model_len=MAX_LEN,
                form="stored",
                dtype=ml_dtypes.bfloat16,
            )
        placed = jax.tree.map(lambda leaf: leaf.sharding, expected)
        restored = restore(out, max_model_len=MAX_LEN, shardings=placed)
        for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True):
            assert same_parts(one, other), one.shape
            compared += 1
            cut += one.addressable_shards[0].data.shape != one.shape
    print(json.dumps({"compared": compared, "cut": cut, "rows": compare_tables(source)}))


if __name__ == "__main__":
    main()
