"""How rows of all data shards reach whole experts that lie over `(data, model)`, and how their sums come back.

Two ways, between which `exchange_rule` decides. Gathered: every chip receives all rows and runs those that chose its
experts. Ragged: a chip sends a row only to those data shards whose chip in its own `model` column holds one of the
row's experts, once however many; the columns together reach every expert. Neither drops a row.

The ragged exchange has static shapes: a fixed number of places for each destination, filled in rounds. A round takes
the next rows in order, as many as find room at all of their destinations, so that all partial sums of a row come back
in one round and are added in order of the shards: a row's result depends on no other row.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from v41jax.layers.collectives import (
    MODEL,
    Parallel,
    any_chip,
    first_expert,
    gather_quantized,
    gather_rows,
    scatter_rows,
    swap_shards,
)
from v41jax.quantization import dequantize_rows, quantize_q8

Array = jax.Array

Serve = Callable[[Array, Array, Array, Array], Array]
"""Experts of this chip: rows [M, D], expert ids [M, k] counted from the chip's first (others are not served), weights
[M, k] and which rows are valid [M] -> sums [M, D] float32."""


def gathered(
    rows: Array,
    experts: Array,
    factors: Array,
    valid: Array,
    serve: Serve,
    *,
    held: int,
    quantized: bool,
    parallel: Parallel,
) -> Array:
    """Sums of the experts of this `model` column, by gathering all rows; see `ragged`."""
    everyone = gather_quantized(rows, quantized)
    experts, factors, valid = gather_rows((experts, factors, valid))
    return scatter_rows(serve(everyone, experts - first_expert(held, parallel), factors, valid))


def ragged(
    rows: Array,
    experts: Array,
    factors: Array,
    valid: Array,
    serve: Serve,
    *,
    held: int,
    places: int,
    quantized: bool,
    parallel: Parallel,
) -> Array:
    """Sums of the experts of this `model` column, by sending rows only where one of their experts is.

    Args:
      rows: [n, D] activation dtype; fake Q8 values when `quantized`.
      experts: [n, k] int32, ascending.
      factors: [n, k] float32.
      valid: [n] bool; other rows are sent nowhere.
      serve: this chip's experts.
      held: experts of a chip.
      places: rows for each destination in a round. A round takes at least as many rows, so that there are at most
        n / places rounds, rounded up.
      quantized: rows travel as codes and scales.
      parallel: the mesh.

    Returns:
      [n, D] float32, to be summed over `model`; zeros for rows that are not valid.
    """
    count, chosen = experts.shape
    sent = quantize_q8(rows) if quantized else rows
    lists = rows_of_shards(experts // held, valid, lax.axis_index(MODEL), parallel, places + 1)
    first = first_expert(held, parallel)

    def travel(leaf: Array, wanted: Array) -> Array:
        arrived = swap_shards(leaf[jnp.minimum(wanted, count - 1)])
        return arrived.reshape(-1, *leaf.shape[1:])

    def one_round(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        start, _, total = state
        wanted, stop = next_rows(lists, start, places, count)
        arrived = jax.tree.map(lambda leaf: travel(leaf, wanted), sent)
        values = dequantize_rows(*arrived).astype(rows.dtype) if quantized else arrived
        near = jnp.minimum(wanted, count - 1)
        ids = jnp.where((wanted < count)[:, :, None], experts[near], -1)
        weights = lax.bitcast_convert_type(factors[near], jnp.int32)
        routing = swap_shards(jnp.concatenate([ids, weights], axis=-1)).reshape(-1, 2 * chosen)
        ids, weights = routing[:, :chosen], lax.bitcast_convert_type(routing[:, chosen:], jnp.float32)
        ids, weights = own_experts(ids, weights, first, held)
        sums = serve(values, ids, weights, ids[:, 0] >= 0)
        back = swap_shards(sums.reshape(parallel.data, places, -1))

        def add(shard: Array, total: Array) -> Array:
            return total.at[wanted[shard]].add(back[shard], mode="drop", indices_are_sorted=True, unique_indices=True)

        return stop, any_chip(stop < count), lax.fori_loop(0, parallel.data, add, total)

    begin = (jnp.int32(0), jnp.bool_(True), jnp.zeros(rows.shape, jnp.float32))
    return lax.while_loop(lambda state: state[1], one_round, begin)[2]


def rows_of_shards(chips: Array, valid: Array, column: Array | int, parallel: Parallel, spare: int) -> Array:
    """The rows that go to every data shard of a `model` column.

    Args:
      chips: [n, k] int32, which chip of the mesh holds each expert of a row.
      valid: [n] bool; other rows go nowhere.
      column: the chip's place on `model`.
      parallel: the mesh.
      spare: padding behind the longest possible list.

    Returns:
      [data, n + spare] int32, each list ascending, padding n.
    """
    count = chips.shape[0]
    own = (chips % parallel.model == column) & valid[:, None]
    shard = jnp.where(own, chips // parallel.model, parallel.data)
    goes = jnp.any(shard == jnp.arange(parallel.data)[:, None, None], axis=-1)
    listed = jnp.sort(jnp.where(goes, jnp.arange(count, dtype=jnp.int32), count), axis=-1)
    return jnp.pad(listed, ((0, 0), (0, spare)), constant_values=count)


def next_rows(lists: Array, start: Array, places: int, count: int) -> tuple[Array, Array]:
    """The rows of one round.

    Args:
      lists: of `rows_of_shards`, with more than `places` spare.
      start: the first row that is not served yet.
      places: for each destination.
      count: rows.

    Returns:
      The row at each place, [data, places] int32, ascending, distinct numbers >= `count` at places that stay empty; and
      the first row of the next round, which is the first that finds one of its destinations full.
    """
    before = jnp.sum(lists < start, axis=1, dtype=jnp.int32)
    column = jnp.arange(places + 1, dtype=jnp.int32)
    listed = jnp.take_along_axis(lists, before[:, None] + column, axis=1)
    stop = jnp.min(listed[:, places])
    return jnp.where(listed[:, :places] < stop, listed[:, :places], count + column[:places]), stop


def own_experts(ids: Array, weights: Array, first: Array | int, held: int) -> tuple[Array, Array]:
    """Of the experts of arrived rows [M, k], ascending, those of this chip first, counted from its first one.

    Returns:
      Ids and weights [M, min(k, held)]; -1 for no expert.
    """
    kept = min(ids.shape[1], held)
    column = jnp.sum(ids < first, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(kept, dtype=jnp.int32)
    near = jnp.minimum(column, ids.shape[1] - 1)
    own = jnp.take_along_axis(ids, near, axis=1) - first
    own = jnp.where((column < ids.shape[1]) & (own >= 0) & (own < held), own, -1)
    return own, jnp.take_along_axis(weights, near, axis=1)
