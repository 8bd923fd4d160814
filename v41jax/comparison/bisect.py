"""The first layer and operation on which two recordings depart, and the rounding flips that are no departure.

Within a layer, operations are compared in the order in which they run. Every row has a tolerance: small until a value
of it, or of something it reads, fell on the other side of a rounding boundary (a flip), larger after that. A row beyond
its tolerance departs.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from v41jax.comparison.metrics import SetDistance, ValueDistance, row_errors, set_distance, swapped_gaps, value_distance
from v41jax.comparison.operations import EMBED, EMBEDDING, HEAD, LAYER, Kind, Operation, quantized
from v41jax.comparison.recording import Recording
from v41jax.config import ModelConfig
from v41jax.precision import Precision

Rows = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """Largest relative L2 distance of a row that is no departure.

    Attributes:
      clean: of a row without a flip.
      flipped: of a row that a flip reaches.
      gap: largest gap in the scores of swapped ids of a clean row, in units of the spread of the row's scores.
    """

    clean: float
    flipped: float
    gap: float


def tolerances(left: Precision, right: Precision) -> Tolerances:
    """Defaults: noise of float32 sums, or one rounding of bfloat16 values, whichever side is the coarser."""
    coarse = jnp.bfloat16 in (left.activation_dtype, right.activation_dtype)
    return Tolerances(2e-2, 0.25, 0.1) if coarse else Tolerances(2e-5, 0.25, 1e-4)


@dataclasses.dataclass(frozen=True)
class Flip:
    """One value whose code differs although the value before the quantizer agrees.

    Attributes:
      layer, operation: the tensor that enters the quantizer.
      index: of the value.
      left, right: the value before the quantizer.
    """

    layer: int
    operation: str
    index: tuple[int, ...]
    left: float
    right: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One operation of one layer.

    Attributes:
      layer: number; `operations.EMBEDDING` and the number of layers stand for embedding and head.
      operation: name of its tensor.
      values: distances of values, or None.
      sets: distances of ids, or None.
      rows: first axis of the tensor.
      flips: codes that differ although the values agree.
      departed: rows beyond their tolerance.
    """

    layer: int
    operation: str
    values: ValueDistance | None
    sets: SetDistance | None
    rows: int
    flips: int
    departed: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Departure:
    """Where two sides part.

    Attributes:
      layer, operation: see `Comparison`.
      what: the computation that makes the operation's tensor.
      rows: that depart.
      error: relative L2 distance of the worst of them; the share of ids that differ for selections.
    """

    layer: int
    operation: str
    what: str
    rows: tuple[int, ...]
    error: float


@dataclasses.dataclass
class Bisection:
    """Result of `bisect`: every comparison in order, the flips located, and the first departure of every layer."""

    comparisons: list[Comparison]
    flips: list[Flip]
    departures: list[Departure]

    @property
    def first(self) -> Departure | None:
        """The first layer and operation that departs."""
        return self.departures[0] if self.departures else None


def bisect(
    left: Recording,
    right: Recording,
    config: ModelConfig,
    precision: Precision,
    allowed: Tolerances,
    index_format: str = "fp4",
) -> Bisection:
    """Compares every operation that both sides recorded.

    Args:
      left, right: of the same prompt; `right` was fed left's inputs layer by layer, or ran free.
      config: of the model.
      precision: the coarser side's.
      allowed: per row.
      index_format: of the index plane.
    """
    search = _Search(left, right, config, precision, allowed, index_format)
    if left.embedding is not None and right.embedding is not None:
        search.begin(EMBEDDING)
        search.compare(EMBED, left.embedding, right.embedding)
    for layer in range(min(len(left.layers), len(right.layers))):
        search.begin(layer)
        for operation in LAYER:
            one, other = (side.layers[layer].get(operation.name) for side in (left, right))
            if one is not None and other is not None:
                search.compare(operation, one, other)
    search.begin(len(config.layers))
    for operation in HEAD:
        one, other = getattr(left, operation.name), getattr(right, operation.name)
        if one is not None and other is not None:
            rows = min(len(one), len(other))
            search.compare(operation, one[len(one) - rows :], other[len(other) - rows :])
    return search.result


class _Search:
    """State of a walk through the operations: which rows and entries flips have reached."""

    def __init__(
        self,
        left: Recording,
        right: Recording,
        config: ModelConfig,
        precision: Precision,
        allowed: Tolerances,
        index_format: str,
    ):
        self.left, self.right, self.config, self.allowed = left, right, config, allowed
        self.precision, self.index_format = precision, index_format
        self.result = Bisection([], [], [])
        self.layer = EMBEDDING
        self.count = len(left.ids)
        self.reached: Rows = np.zeros(self.count, bool)
        self.entries: dict[tuple[int, str], Rows] = {}
        self.found = False

    def begin(self, layer: int) -> None:
        """A new layer: flips of the one before are in its inputs, which are the same on both sides when forced."""
        self.layer, self.found = layer, False
        self.reached = np.zeros(self.count, bool)

    def compare(self, operation: Operation, left: NDArray, right: NDArray) -> None:
        """One operation; `left` and `right` of equal shape but for the padding of ids."""
        if operation.kind in (Kind.IDS, Kind.EXACT):
            self._compare_ids(operation, left, right)
            return
        if left.shape != right.shape:
            raise ValueError(f"layer {self.layer}, {operation.name}: shapes {left.shape} and {right.shape} differ")
        reached = self._reached_before(operation, len(left))
        ignored = self._flipped_keys(left.shape) if operation.kind is Kind.SCORES else None
        if ignored is not None:
            left, right = np.where(ignored, 0, left), np.where(ignored, 0, right)
        errors = row_errors(left, right)
        limit = np.where(reached, self.allowed.flipped, self.allowed.clean)
        departed = np.flatnonzero(~(errors <= limit))
        flips = self._flips(operation, left, right, errors <= limit)
        distance = value_distance(left, right, self.precision.activation_dtype)
        self._add(operation, distance, None, len(left), flips, departed, float(errors.max(initial=0.0)))

    def _compare_ids(self, operation: Operation, left: NDArray, right: NDArray) -> None:
        if operation.kind is Kind.EXACT:
            same = (left == right).reshape(len(left), -1)
            distance = SetDistance(float(same.mean()), int((~same.all(axis=1)).sum()), np.nan, np.nan)
            departed = np.flatnonzero(~same.all(axis=1))
            self._add(operation, None, distance, len(left), 0, departed, 1 - distance.overlap)
            return
        scores = self._scores(operation)
        distance = set_distance(left, right, scores)
        width = max(left.shape[1], right.shape[1])
        differs = (np.sort(_padded(left, width), axis=1) != np.sort(_padded(right, width), axis=1)).any(axis=1)
        if scores is not None:
            gaps = swapped_gaps(left, right, scores)
            excused = gaps <= np.where(self.reached, self.allowed.flipped * 4, self.allowed.gap)
        else:
            excused = self.reached if operation.name != "topk" or self._own_source() else np.zeros(len(left), bool)
        # Either order of two scores that agree within their tolerance is right; what follows reads other entries.
        self.reached = self.reached | (differs & excused)
        self._add(operation, None, distance, len(left), 0, np.flatnonzero(differs & ~excused), 1 - distance.overlap)

    def _own_source(self) -> bool:
        return self.config.layers[self.layer].topk_owner == self.layer

    def _scores(self, operation: Operation) -> NDArray | None:
        """What a selection was made from, as left has it."""
        tensors = self.left.layers[self.layer]
        if operation.name == "topk" and self._own_source():
            return tensors.get("index_scores")
        if operation.name == "candidate_blocks" and "index_scores" in tensors:
            return block_scores(tensors["index_scores"], self.config)
        return None

    def _reached_before(self, operation: Operation, rows: int) -> Rows:
        if operation.kind is Kind.ENTRIES:
            before = {"compressed": "compressed_kv", "index_keys": "index_key"}.get(operation.name, operation.name)
            return self.entries.get((self.layer, before), np.zeros(rows, bool))
        if operation.name == "attended":
            self.reached = self.reached | self._reads_flipped_entries()
        if operation.name == "routed_output":
            near = self.left.layers[self.layer].get("experts_near_boundary")
            if near is not None:
                self.reached = self.reached | near
        reached = self.reached
        return reached[len(reached) - rows :] if len(reached) > rows else reached

    def _flips(self, operation: Operation, left: NDArray, right: NDArray, agree: Rows) -> int:
        """Locates the flips at an operation's quantizer and marks what they reach."""
        if operation.quantizer is None or not self.precision.activation_quantization or not left.size:
            return 0
        codes = [quantized(side, operation.quantizer, self.index_format) for side in (left, right)]
        differ = (codes[0] != codes[1]) & agree.reshape(-1, *(1,) * (left.ndim - 1))
        for index in np.argwhere(differ):
            place = tuple(int(axis) for axis in index)
            flip = Flip(self.layer, operation.name, place, float(left[place]), float(right[place]))
            self.result.flips.append(flip)
        rows = differ.reshape(len(left), -1).any(axis=1)
        if operation.kind is Kind.ENTRIES:
            self.entries[(self.layer, operation.name)] = rows
            if operation.name == "index_key" and rows.any():
                self.reached = self.reached | self._sees(rows)
        elif operation.name == "window_kv":
            for row in np.flatnonzero(rows):
                self.reached[row : row + self.config.text.sliding_window] = True
        else:
            self.reached = self.reached | rows
        return int(differ.sum())

    def _sees(self, entries: Rows) -> Rows:
        """Rows for which one of these entries is visible."""
        ratio = self.config.layers[self.layer].ratio
        return (np.arange(self.count) + 1) // ratio > int(np.argmax(entries))

    def _flipped_keys(self, shape: tuple[int, ...]) -> Rows | None:
        owner = self.config.layers[self.layer].kv_owner
        flipped = self.entries.get((owner, "index_key")) if owner is not None else None
        if flipped is None or not flipped.any():
            return None
        self.reached = self.reached | self._sees(flipped)
        return np.broadcast_to(flipped[None, :], shape)

    def _reads_flipped_entries(self) -> Rows:
        owner = self.config.layers[self.layer].kv_owner
        flipped = self.entries.get((owner, "compressed_kv")) if owner is not None else None
        topk = self.left.layers[self.layer].get("topk")
        if flipped is None or topk is None:
            return np.zeros(self.count, bool)
        return (flipped[np.maximum(topk, 0)] & (topk >= 0)).any(axis=1)

    def _add(
        self,
        operation: Operation,
        values: ValueDistance | None,
        sets: SetDistance | None,
        rows: int,
        flips: int,
        departed: NDArray[np.intp],
        error: float,
    ) -> None:
        places = tuple(int(row) for row in departed)
        self.result.comparisons.append(Comparison(self.layer, operation.name, values, sets, rows, flips, places))
        if places and not self.found:
            self.found = True
            self.result.departures.append(Departure(self.layer, operation.name, operation.what, places, error))


def block_scores(scores: NDArray, config: ModelConfig) -> NDArray:
    """Best score of every candidate block, [rows, blocks]; the newest visible block of a row is infinite."""
    size = config.text.candidate_block_size
    rows, entries = scores.shape
    blocks = -(-entries // size)
    padded = np.full((rows, blocks * size), -np.inf)
    padded[:, :entries] = scores
    best = padded.reshape(rows, blocks, size).max(axis=2)
    seen = np.isfinite(best)
    newest = blocks - 1 - np.argmax(seen[:, ::-1], axis=1)
    pinned = seen.any(axis=1)
    best[np.flatnonzero(pinned), newest[pinned]] = np.finfo(np.float64).max
    return best


def _padded(ids: NDArray, width: int) -> NDArray:
    result = np.full((ids.shape[0], width), -1, np.int64)
    result[:, : ids.shape[1]] = ids
    return result
