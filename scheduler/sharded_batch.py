"""One step of several data shards: their batches as one, and where their rows lie in the arrays of the step.

The arrays of such a step are those of its shards, one after the other, all of one shape; a shard that runs nothing has
padding there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler.buckets import StepShape
from scheduler.scheduled_batch import ScheduledBatch
from scheduler.states import ImageRestore, ImageStore, Relocation, StateMaintenanceOps

Places = NDArray[np.int64]
Op = TypeVar("Op", ImageStore, ImageRestore)


@dataclasses.dataclass(frozen=True)
class ShardSizes:
    """Memory of one data shard.

    Attributes:
      pages: PAGE units.
      slots: state slots.
      images: checkpoint images.
    """

    pages: int
    slots: int
    images: int


def join_batches(index: int, parts: Sequence[ScheduledBatch | None], sizes: ShardSizes) -> ScheduledBatch:
    """The batch of a step from those of the shards that run.

    Args:
      index: serial number of the step.
      parts: by shard, of one phase; not all None.
      sizes: of one shard.
    """
    present = [(shard, part) for shard, part in enumerate(parts) if part is not None]
    batches = [part for _, part in present]
    first = batches[0]
    values: dict[str, Any] = {}
    for field in dataclasses.fields(ScheduledBatch):
        columns = [getattr(part, field.name) for part in batches]
        if isinstance(columns[0], tuple):
            values[field.name] = tuple(entry for column in columns for entry in column)
        elif isinstance(columns[0], np.ndarray) and field.name != "block_tables":
            values[field.name] = np.concatenate(columns)
    slots = [part.slots + np.int32(shard * sizes.slots) for shard, part in present]
    return ScheduledBatch(
        **values
        | {
            "index": index,
            "phase": first.phase,
            "slots": np.concatenate(slots),
            "block_tables": _tables(present, sizes.pages),
            "decoder_replay": first.decoder_replay,
            "ops": _join_ops(present, sizes),
            "parts": tuple(parts),
        }
    )


def _tables(present: list[tuple[int, ScheduledBatch]], pages: int) -> NDArray[np.int32]:
    width = max(part.block_tables.shape[1] for _, part in present)
    tables = []
    for shard, part in present:
        used = np.arange(part.block_tables.shape[1]) < part.table_lengths[:, None]
        table = np.where(used, part.block_tables + shard * pages, 0).astype(np.int32)
        tables.append(np.pad(table, ((0, 0), (0, width - table.shape[1]))))
    return np.concatenate(tables)


def _join_ops(present: list[tuple[int, ScheduledBatch]], sizes: ShardSizes) -> StateMaintenanceOps:
    relocations: list[Relocation] = []
    stores: list[ImageStore] = []
    restores: list[ImageRestore] = []
    for shard, part in present:
        first = shard * sizes.slots
        relocations += [Relocation(first + move.source, first + move.destination) for move in part.ops.relocations]
        stores += [_moved(store, shard, sizes) for store in part.ops.stores]
        restores += [_moved(restore, shard, sizes) for restore in part.ops.restores]
    return StateMaintenanceOps(tuple(relocations), tuple(stores), tuple(restores))


def _moved(op: Op, shard: int, sizes: ShardSizes) -> Op:
    """An operation of a shard with ids that count over all shards."""
    return op._replace(
        slot=op.slot + shard * sizes.slots,
        image=op.image + shard * sizes.images,
        units=tuple(unit + shard * sizes.pages for unit in op.units),
    )


def spread(counts: Iterable[int], size: int) -> Places:
    """Places of the first `counts[s]` entries of every shard's part, each part having `size` entries."""
    parts = [np.arange(count) + shard * size for shard, count in enumerate(counts)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def request_places(batch: ScheduledBatch, shape: StepShape) -> Places:
    """[b] where the requests of a batch lie among the request descriptors of its step."""
    return spread((0 if part is None else part.num_requests for part in batch.shards), shape.requests)


def row_places(batch: ScheduledBatch, shape: StepShape) -> Places:
    """[n] where the rows of a batch lie among the rows of its step."""
    return spread((0 if part is None else part.num_rows for part in batch.shards), shape.rows)


def first_rows(batch: ScheduledBatch, shape: StepShape) -> Places:
    """[b] where the first row of each request lies among the rows of its step; the others follow."""
    first: Places = row_places(batch, shape)[np.cumsum(batch.lengths) - batch.lengths]
    return first


def output_places(batch: ScheduledBatch, shape: StepShape) -> Places:
    """[outputs] where the requests that get tokens lie among the entries of a step's `SamplingInputs` and tokens."""
    size = shape.requests if shape.verifies else shape.outputs
    return spread((0 if part is None else len(part.output_requests) for part in batch.shards), size)


def first_output_rows(batch: ScheduledBatch, shape: StepShape) -> Places:
    """[outputs] first output row of each request that gets tokens; those of its proposals follow."""
    if not shape.verifies:
        return output_places(batch, shape)
    return first_rows(batch, shape)
