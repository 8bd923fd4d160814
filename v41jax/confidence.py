"""Confidence in drafted tokens: calibration by sequential temperatures, reliability, and how many tokens to verify.

Host side, NumPy, float64. A confidence is the probability that a proposal survives verification given that every
proposal before it did; `sigmoid` of the draft's confidence logit. Letters: `n` requests or blocks, `S` proposals of a
block. Where profiles come from and when one may be used is `confidence_profile`'s business.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float = NDArray[np.float64]

CLIP = 1e-6
"""Confidences are kept this far from 0 and 1 before their logit is taken."""

BINS = 15
"""Equal bins of the calibration error."""

TEMPERATURES = 2.0 ** np.linspace(-2, 2, 161)
"""Candidates of a fit, 0.25 .. 4, evenly spaced in the logarithm; the middle one is exactly 1."""


def confidences_of(logits: ArrayLike) -> Float:
    """`sigmoid` of the draft's confidence logits, any shape."""
    return np.exp(-np.logaddexp(0.0, -np.asarray(logits, np.float64)))


def survival(confidences: ArrayLike, temperatures: ArrayLike) -> Float:
    """Probability that each prefix of a block survives whole (DSpark specification, "Verification width").

    Args:
      confidences: [n, S].
      temperatures: [S].

    Returns:
      [n, S], never increasing along a block.
    """
    return np.cumprod(_calibrated(confidences, np.asarray(temperatures, np.float64)), axis=-1)


def _calibrated(confidences: ArrayLike, temperatures: Float | float) -> Float:
    clipped = np.clip(np.asarray(confidences, np.float64), CLIP, 1 - CLIP)
    return confidences_of((np.log(clipped) - np.log1p(-clipped)) / temperatures)


# How many to verify ------------------------------------------------------------------------------------------


def step_rates(rows: Sequence[int], rates: Sequence[float], last: int) -> Float:
    """Dense table of forwards per second by rows, from measured points.

    Linear between points, flat outside them, never increasing: a faster measurement at more rows is noise, and the
    slower of the two rates stands.

    Args:
      rows: measured row counts, any order, distinct, at least one.
      rates: forwards per second at each, positive.
      last: rows of the largest forward.

    Returns:
      [last + 1]; index is rows.

    Raises:
      ValueError: measurements that are no rates.
    """
    points, values = np.asarray(rows, np.float64), np.asarray(rates, np.float64)
    if points.ndim != 1 or points.shape != values.shape or not points.size or np.unique(points).size != points.size:
        raise ValueError(f"step rates need one positive rate for each distinct row count, got {rows} and {rates}")
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"step rates {list(rates)} must be finite and positive")
    order = np.argsort(points)
    return np.interp(np.arange(last + 1), points[order], np.minimum.accumulate(values[order]))


def choose_lengths(
    survivals: ArrayLike, rates: ArrayLike, limits: ArrayLike | None = None, homes: ArrayLike | None = None
) -> NDArray[np.int64]:
    """How many proposals of each request to verify: the most tokens per second that confidence and cost promise.

    Proposals are admitted in falling order of survival as long as each one raises the expected rate (DSpark
    specification, "Verification width"). Stopping at the first that does not keeps the decision free of later ones.
    Over several data shards, whose steps have the rows of the largest, a row more there admits the best proposal of
    every shard that has room below it.

    Args:
      survivals: [n, S], never increasing along a row.
      rates: [B], forwards per second by rows of the largest shard, the last entry holding for more.
      limits: [n] most proposals of each request (room before its length limit); None is `S`.
      homes: [n] data shard of each request; None is one for all.

    Returns:
      [n] lengths 0..S.
    """
    values, speed = np.asarray(survivals, np.float64), np.asarray(rates, np.float64)
    count, width = values.shape
    homes = np.zeros(count, np.int64) if homes is None else np.asarray(homes, np.int64)
    anchors = np.bincount(homes, minlength=1)
    request, place = np.divmod(np.arange(count * width), width)
    flat = values.reshape(-1)
    # Equal survivals in block order, so that what is admitted is a prefix of every block.
    order = np.lexsort((request, place, -flat))
    if limits is not None:
        order = order[place[order] < np.asarray(limits)[request[order]]]
    # The rows of its shard once a proposal and all before it are admitted: at no less rows is it part of the step.
    rank = np.zeros(order.size, np.int64)
    for shard in range(len(anchors)):
        mine = homes[request[order]] == shard
        rank[mine] = anchors[shard] + 1 + np.arange(mine.sum())
    first = anchors.max()
    levels = np.arange(first, max(rank.max(initial=first), first) + 1)
    gained = np.bincount(np.maximum(rank, first) - first, weights=flat[order], minlength=levels.size)
    promised = (count + np.cumsum(gained)) * speed[np.minimum(levels, speed.size - 1)]
    worse = np.flatnonzero(promised[1:] <= promised[:-1])
    level = levels[worse[0]] if worse.size else levels[-1]
    return np.bincount(request[order[rank <= level]], minlength=count)


def round_up_lengths(lengths: ArrayLike, buckets: Sequence[int]) -> int:
    """The smallest compiled proposal count that none of the lengths exceeds.

    Args:
      lengths: [n].
      buckets: ascending proposal counts with a compiled step; the last is the full width.
    """
    most = int(np.max(np.asarray(lengths), initial=0))
    for bucket in buckets:
        if bucket >= most:
            return bucket
    raise ValueError(f"{most} proposals exceed the compiled widths {list(buckets)}")


# Calibration -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Verified blocks to calibrate on.

    Attributes:
      confidences: [n, S] before calibration.
      offered: [n] proposals that were verified, 0..S; what lies beyond says nothing.
      accepted: [n] proposals that survived, at most `offered`.
      requests: [n] request of each block.

    Raises:
      ValueError: with every broken rule.
    """

    confidences: Float
    offered: NDArray[np.int64]
    accepted: NDArray[np.int64]
    requests: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name, dtype in (("confidences", float), ("offered", int), ("accepted", int), ("requests", int)):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype))
        faults = []
        if self.confidences.ndim != 2:
            faults.append(f"confidences has shape {self.confidences.shape}, must be [blocks, proposals]")
        else:
            count, width = self.confidences.shape
            for name in ("offered", "accepted", "requests"):
                if getattr(self, name).shape != (count,):
                    faults.append(f"{name} has shape {getattr(self, name).shape} for {count} blocks")
            if not faults:
                if ((self.offered < 0) | (self.offered > width)).any():
                    faults.append(f"offered must lie in 0..{width}")
                if ((self.accepted < 0) | (self.accepted > self.offered)).any():
                    faults.append("accepted must lie in 0..offered")
            if not ((self.confidences >= 0) & (self.confidences <= 1)).all():
                faults.append("confidences must lie in 0..1")
        if faults:
            raise ValueError("; ".join(faults))

    def take(self, chosen: NDArray[np.bool_]) -> Blocks:
        """The chosen blocks, [n] bool."""
        return Blocks(self.confidences[chosen], self.offered[chosen], self.accepted[chosen], self.requests[chosen])

    def split(self, share: float) -> tuple[Blocks, Blocks]:
        """Blocks to fit on, and blocks of about `share` of the requests to judge by; no request is in both."""
        names = np.unique(self.requests)
        held = names[names.size - round(share * names.size) :]
        held_out = np.isin(self.requests, held)
        return self.take(~held_out), self.take(held_out)


def fit_temperatures(blocks: Blocks) -> Float:
    """One temperature a position, fitted left to right (DSpark specification, "Calibration profile").

    Each minimizes the calibration error of the cumulative survival at its position with the temperatures before it
    fixed, over the blocks that offered the position; ties go to the one nearest 1, and a position that no block
    offered keeps 1.

    Returns:
      [S].
    """
    width = blocks.confidences.shape[1]
    candidates = TEMPERATURES[np.argsort(np.abs(np.log(TEMPERATURES)), kind="stable")]
    chosen = np.ones(width)
    before = np.ones(blocks.offered.size)
    for place in range(width):
        offered = blocks.offered > place
        if offered.any():
            labels = blocks.accepted[offered] > place
            raw = blocks.confidences[offered, place]
            errors = [calibration_error(before[offered] * _calibrated(raw, float(t)), labels) for t in candidates]
            chosen[place] = candidates[int(np.argmin(errors))]
        before = before * _calibrated(blocks.confidences[:, place], float(chosen[place]))
    return chosen


def _bins(predicted: Float) -> NDArray[np.int64]:
    return np.minimum((predicted * BINS).astype(np.int64), BINS - 1)


def calibration_error(predicted: Float, labels: NDArray[np.bool_]) -> float:
    """Expected calibration error over `BINS` equal bins: [n] probabilities, [n] outcomes."""
    gaps = np.bincount(_bins(predicted), weights=predicted - labels, minlength=BINS)
    return float(np.abs(gaps).sum() / predicted.size)


class Reliability(NamedTuple):
    """How well the survival at one position was predicted.

    Attributes:
      blocks: that offered the position.
      calibration_error, brier, negative_log_likelihood: means over them; NaN without any.
      predicted, observed: [BINS] mean prediction and share that survived of each bin; NaN in an empty one.
      counts: [BINS] blocks of each bin.
    """

    blocks: int
    calibration_error: float
    brier: float
    negative_log_likelihood: float
    predicted: Float
    observed: Float
    counts: NDArray[np.int64]


def reliability(blocks: Blocks, temperatures: ArrayLike) -> tuple[Reliability, ...]:
    """Report of every position under the given temperatures, [S] of them."""
    survivals = survival(blocks.confidences, temperatures)
    result = []
    for place in range(survivals.shape[1]):
        offered = blocks.offered > place
        predicted, labels = survivals[offered, place], blocks.accepted[offered] > place
        counts = np.bincount(_bins(predicted), minlength=BINS)
        sums = [np.bincount(_bins(predicted), weights=values, minlength=BINS) for values in (predicted, labels)]
        means = [np.divide(total, counts, out=np.full(BINS, np.nan), where=counts > 0) for total in sums]
        certain = np.clip(predicted, CLIP, 1 - CLIP)
        empty = not predicted.size
        result.append(
            Reliability(
                blocks=predicted.size,
                calibration_error=np.nan if empty else calibration_error(predicted, labels),
                brier=np.nan if empty else float(np.mean((predicted - labels) ** 2)),
                negative_log_likelihood=np.nan
                if empty
                else float(-np.mean(np.where(labels, np.log(certain), np.log1p(-certain)))),
                predicted=means[0],
                observed=means[1],
                counts=counts,
            )
        )
    return tuple(result)
