"""State slots, the kinds of state transfer and the operations that move state.

Slots are private to a request. Bytes are opaque here: the runner moves them. The images themselves are kept in
`checkpoint_images`.
"""

from __future__ import annotations

import dataclasses
import enum
import heapq
from collections.abc import Callable, Iterable
from typing import NamedTuple

from scheduler.pool_geometry import V41PoolGeometry


class TransferKind(enum.Enum):
    """What makes a prefix hit resumable."""

    NONE = "none"
    COPY = "copy"
    REPLAY = "replay"


@dataclasses.dataclass(frozen=True)
class CheckpointSpec:
    """What a backend stores in one checkpoint image.

    Attributes:
      layout_id: identity of the state bytes.
      image_bytes: bytes of one image.
      units: PAGE units one image reserves.
    """

    layout_id: str
    image_bytes: int
    units: int

    @classmethod
    def of(cls, geometry: V41PoolGeometry) -> CheckpointSpec:
        """The specification a geometry implies."""
        return cls(geometry.layout_id, geometry.image_bytes, geometry.units_per_image)


@dataclasses.dataclass(frozen=True)
class StateTransfer:
    """How a request that reuses pages gets its rings (runtime specification, "State transfer").

    Attributes:
      kind: see `TransferKind`.
      layout_id: identity of images under `COPY`, empty otherwise.
      checkpoint: what an image holds under `COPY`, None otherwise.
    """

    kind: TransferKind
    layout_id: str = ""
    checkpoint: CheckpointSpec | None = None

    def __post_init__(self) -> None:
        if self.kind is TransferKind.COPY:
            if not self.layout_id:
                raise ValueError("copy transfer needs a layout id")
            if self.checkpoint is None or self.checkpoint.layout_id != self.layout_id:
                found = None if self.checkpoint is None else self.checkpoint.layout_id
                raise ValueError(f"copy transfer of layout {self.layout_id!r} got a checkpoint of layout {found!r}")
        elif self.layout_id or self.checkpoint is not None:
            raise ValueError(f"{self.kind.value} transfer keeps no images: it takes no layout id and no checkpoint")

    @classmethod
    def copy(cls, checkpoint: CheckpointSpec) -> StateTransfer:
        """Restores a saved image at the hit."""
        return cls(TransferKind.COPY, checkpoint.layout_id, checkpoint)

    @classmethod
    def replay(cls) -> StateTransfer:
        """Recomputes one hash block below the hit (encoder bounded replay)."""
        return cls(TransferKind.REPLAY)

    @classmethod
    def none(cls) -> StateTransfer:
        """No reuse."""
        return cls(TransferKind.NONE)


def gate_fixpoint(gates: Iterable[Callable[[int], int]], hit: int) -> int:
    """Largest prefix that every state class can resume, at most `hit`.

    Each gate maps a prefix to the longest one it can back that is not longer; a later answer may invalidate an
    earlier one, so the gates are applied until none shortens the prefix further.
    """
    gates = tuple(gates)
    while True:
        before = hit
        for gate in gates:
            hit = gate(hit)
        if hit == before:
            return hit


class Relocation(NamedTuple):
    """Copies every byte of slot `source` to slot `destination`; all sources are read before any write."""

    source: int
    destination: int


class ImageStore(NamedTuple):
    """Copies the carried bytes of a slot into an image.

    Attributes:
      slot: slot to read.
      image: row of the image array.
      units: PAGE units charged for the image.
      position: cursor position the slot must hold.
      layout_id: identity of the bytes.
      image_bytes: their number.
    """

    slot: int
    image: int
    units: tuple[int, ...]
    position: int
    layout_id: str
    image_bytes: int


class ImageRestore(NamedTuple):
    """Copies an image into a slot; fields as in `ImageStore`."""

    image: int
    slot: int
    units: tuple[int, ...]
    position: int
    layout_id: str
    image_bytes: int


class StateMaintenanceOps(NamedTuple):
    """State operations a batch carries, executed in this order before its forward."""

    relocations: tuple[Relocation, ...] = ()
    stores: tuple[ImageStore, ...] = ()
    restores: tuple[ImageRestore, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.relocations or self.stores or self.restores)


def validate_ops(
    ops: StateMaintenanceOps, checkpoint: CheckpointSpec | None, num_pages: int, num_slots: int, num_images: int
) -> None:
    """Checks every operation before any byte moves.

    Raises:
      ValueError: with every fault.
    """
    faults = []
    destinations = [move.destination for move in ops.relocations]
    if len(set(destinations)) != len(destinations):
        faults.append(f"relocations write one slot twice: {destinations}")
    for move in ops.relocations:
        for slot in move:
            if not 0 <= slot < num_slots:
                faults.append(f"relocation names slot {slot}, slots are 0..{num_slots - 1}")
    images: list[ImageStore | ImageRestore] = [*ops.stores, *ops.restores]
    for op in images:
        what = type(op).__name__
        if checkpoint is None:
            faults.append(f"{what} of image {op.image}: this transfer keeps no images")
            continue
        if op.layout_id != checkpoint.layout_id:
            faults.append(f"{what} of image {op.image}: layout {op.layout_id!r} is not {checkpoint.layout_id!r}")
        if op.image_bytes != checkpoint.image_bytes:
            faults.append(f"{what} of image {op.image}: {op.image_bytes} bytes, not {checkpoint.image_bytes}")
        if len(op.units) != checkpoint.units or len(set(op.units)) != len(op.units):
            faults.append(f"{what} of image {op.image}: needs {checkpoint.units} distinct units, got {op.units}")
        if any(not 0 <= unit < num_pages for unit in op.units):
            faults.append(f"{what} of image {op.image}: units {op.units} leave 0..{num_pages - 1}")
        if not 0 <= op.slot < num_slots:
            faults.append(f"{what} of image {op.image}: slot {op.slot} is outside 0..{num_slots - 1}")
        if not 0 <= op.image < num_images:
            faults.append(f"{what}: image {op.image} is outside 0..{num_images - 1}")
    targets = [op.slot for op in ops.restores]
    if len(set(targets)) != len(targets):
        faults.append(f"restores write one slot twice: {targets}")
    if faults:
        raise ValueError("; ".join(faults))


class StateSlotPool:
    """Hands out slot ids, lowest free first; the only component that invents them."""

    def __init__(self, num_slots: int):
        if num_slots < 1:
            raise ValueError(f"{num_slots} slots cannot serve anything: at least 1 is needed")
        self.num_slots = num_slots
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return len(self._free)

    def free_slots(self) -> tuple[int, ...]:
        """Ids of the free slots."""
        return tuple(self._free)

    def take(self) -> int:
        """Takes the lowest free slot; callers check `num_free` first."""
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        """Returns a slot."""
        if slot in self._free or not 0 <= slot < self.num_slots:
            raise RuntimeError(f"slot {slot} is returned but was not taken")
        heapq.heappush(self._free, slot)

    def exchange(self, given: Iterable[int], wanted: Iterable[int]) -> None:
        """Gives slots back and takes named free ones, as one step.

        Raises:
          ValueError: when a wanted slot is neither free nor given; nothing changes then.
        """
        wanted = list(wanted)
        free = set(self._free) | set(given)
        missing = [slot for slot in wanted if slot not in free]
        if missing or len(set(wanted)) != len(wanted):
            raise ValueError(f"slots {wanted} cannot all be taken: not free or named twice {missing}")
        self._free = sorted(free - set(wanted))
