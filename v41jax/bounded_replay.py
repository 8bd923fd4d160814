"""Which rows run which layer when the decoder keeps only what something later reads.

Every row runs the encoder and has its entries published by the first decoder layer; the rest of the decoder runs on
the last window of every finishing request, and of the last layer only one row a request goes beyond its window keys
(runtime specification, "Row sets (normative)"). Rows are chosen by gathering; the layers themselves do not know.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from scheduler.batch import TailPlan
from v41jax.layers.rows import Rows

Array = jax.Array
Tree = TypeVar("Tree")


class Queries(NamedTuple):
    """Rows that go on after a layer's window keys.

    Attributes:
      index: [F] int32, among the rows the layer runs on; clamped at padding.
      rows: what the layer must know about them; their `in_forward_row` still counts all rows of the layer.
    """

    index: Array
    rows: Rows


def take_rows(tree: Tree, index: Array) -> Tree:
    """Rows of every leaf; out-of-range indices give the last row."""
    return jax.tree.map(lambda leaf: leaf[jnp.minimum(index, leaf.shape[0] - 1)], tree)


def tail_rows(rows: Rows, tail: TailPlan) -> Rows:
    """The decoder's rows: their windows start at the tail, hold rows of this forward only, and all are kept.

    The decoder's rings hold nothing for the positions of this forward, and what they hold for earlier ones was left by
    nobody: neither is read (runtime specification, "Windows in the decoder").

    Args:
      rows: of all rows of the batch.
      tail: of the batch.
    """
    real = tail.rows < rows.positions.shape[0]
    taken = _with_padding(take_rows(rows, tail.rows), real)
    return taken._replace(
        window_floor=tail.floor,
        in_forward_from=tail.floor,
        in_forward_row=jnp.arange(len(tail.rows), dtype=jnp.int32),
        ring_rows=real,
    )


def last_rows(rows: Rows, tail: TailPlan) -> Queries:
    """The last row of every finishing request; `rows` are those of `tail_rows`."""
    count = rows.positions.shape[0]
    taken = _with_padding(take_rows(rows, tail.last), tail.last < count)
    return Queries(jnp.minimum(tail.last, count - 1), taken)


def _with_padding(rows: Rows, real: Array) -> Rows:
    """Rows of which those that are not `real` take part in nothing."""
    return rows._replace(
        positions=jnp.where(real, rows.positions, 0),
        batch_ids=jnp.where(real, rows.batch_ids, -1),
        image_rows=rows.image_rows & real,
        engram_rows=rows.engram_rows & real,
    )
