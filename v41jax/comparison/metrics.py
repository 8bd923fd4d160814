"""Distances between two tensors, two selections, and two sets of logits; NumPy in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import DTypeLike, NDArray

Float = NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class ValueDistance:
    """Right against left.

    Attributes:
      relative_l2: of the whole tensor.
      max_abs: largest difference of one value.
      ulps_max, ulps_median: differences in units of the last place of the larger value, in the activation dtype.
      cosine: of the two tensors as vectors.
      worst_row: largest relative L2 distance of a row.
    """

    relative_l2: float
    max_abs: float
    ulps_max: float
    ulps_median: float
    cosine: float
    worst_row: float


@dataclasses.dataclass(frozen=True)
class SetDistance:
    """Right's selections against left's.

    Attributes:
      overlap: mean share of a row's ids that both chose.
      rows_differing: rows whose sets are not equal.
      border_margin: median over rows of the score between the last chosen and the first that was not, as left scores
        them, in units of the spread of the row's scores; NaN without scores.
      swapped_gap: over the rows that differ, the largest gap in left's scores between an id only left chose and an id
        only right chose, same unit; 0 where nothing differs, NaN without scores.
    """

    overlap: float
    rows_differing: int
    border_margin: float
    swapped_gap: float


@dataclasses.dataclass(frozen=True)
class EndDistance:
    """Right's logits against left's, over all rows compared.

    Attributes:
      rows: compared.
      logits_mean, logits_max: relative L2 distance of a row.
      max_abs: of one logit.
      cosine: mean over rows.
      kl_mean, kl_max: of right's distribution from left's, nats.
      top1: share of rows with the same most likely token.
      nll_left, nll_right: mean negative log-likelihood of the prompt's own next token.
    """

    rows: int
    logits_mean: float
    logits_max: float
    max_abs: float
    cosine: float
    kl_mean: float
    kl_max: float
    top1: float
    nll_left: float
    nll_right: float

    @property
    def nll_change(self) -> float:
        """Right minus left."""
        return self.nll_right - self.nll_left


def row_errors(left: NDArray, right: NDArray) -> Float:
    """Relative L2 distance of each row, [rows]; infinite where one side is not a number and the other is.

    A row far smaller than the tensor's largest is measured against a thousandth of that one.
    """
    a, b, unlike = _finite(left, right)
    rows = a.shape[0]
    norms = np.linalg.norm(a.reshape(rows, -1), axis=1)
    floor = max(1e-3 * norms.max(initial=0.0), np.finfo(np.float32).tiny)
    errors = np.linalg.norm((a - b).reshape(rows, -1), axis=1) / np.maximum(norms, floor)
    return np.where(unlike.reshape(rows, -1).any(axis=1), np.inf, errors)


def value_distance(left: NDArray, right: NDArray, dtype: DTypeLike) -> ValueDistance:
    """Distances of two tensors of the same shape; `dtype` is the activation dtype, whose ulps are counted."""
    a, b, unlike = _finite(left, right)
    if not a.size:
        return ValueDistance(0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    steps = np.abs(a - b) / ulp(np.maximum(np.abs(a), np.abs(b)), dtype)
    norm = float(np.linalg.norm(a))
    product = norm * float(np.linalg.norm(b))
    lost = bool(unlike.any())
    return ValueDistance(
        relative_l2=np.inf if lost else float(np.linalg.norm(a - b)) / max(norm, np.finfo(np.float32).tiny),
        max_abs=np.inf if lost else float(np.abs(a - b).max()),
        ulps_max=np.inf if lost else float(steps.max()),
        ulps_median=float(np.median(steps)),
        cosine=float((a * b).sum() / product) if product else 1.0,
        worst_row=float(row_errors(left, right).max()),
    )


def ulp(magnitude: Float, dtype: DTypeLike) -> Float:
    """Spacing of a dtype's numbers at a magnitude, float32 or bfloat16."""
    single = np.maximum(magnitude, np.finfo(np.float32).tiny).astype(np.float32)
    spacing = np.spacing(single).astype(np.float64)
    return spacing * 2.0**16 if np.dtype(dtype).name == "bfloat16" else spacing


def set_distance(left: NDArray, right: NDArray, scores: NDArray | None = None) -> SetDistance:
    """Distance of two selections.

    Args:
      left, right: [rows, K] ids, -1 padded; widths may differ.
      scores: left's [rows, ids], -inf where an id may not be chosen; None leaves the margins open.
    """
    rows = left.shape[0]
    shares, gaps, margins, differing = np.ones(rows), np.zeros(rows), np.full(rows, np.nan), 0
    for row in range(rows):
        a, b = left[row][left[row] >= 0], right[row][right[row] >= 0]
        common = np.intersect1d(a, b)
        shares[row] = len(common) / max(len(a), len(b), 1)
        same = len(common) == max(len(a), len(b))
        differing += not same
        if scores is None:
            continue
        own = np.asarray(scores[row], np.float64)
        finite = own[np.isfinite(own)]
        spread = max(float(finite.std()) if finite.size else 0.0, np.finfo(np.float32).tiny)
        rest = np.setdiff1d(np.flatnonzero(np.isfinite(own)), a)
        if len(a) and rest.size:
            margins[row] = (own[a].min() - own[rest].max()) / spread
        if not same:
            gaps[row] = _swapped_gap(own, np.setdiff1d(a, b), np.setdiff1d(b, a)) / spread
    known = margins[~np.isnan(margins)]
    return SetDistance(
        overlap=float(shares.mean()) if rows else 1.0,
        rows_differing=differing,
        border_margin=float(np.median(known)) if known.size else np.nan,
        swapped_gap=np.nan if scores is None else float(gaps.max(initial=0.0)),
    )


def swapped_gaps(left: NDArray, right: NDArray, scores: NDArray) -> Float:
    """Per row the gap of `SetDistance.swapped_gap`; 0 where the sets are equal; [rows]."""
    return np.array(
        [
            set_distance(left[row : row + 1], right[row : row + 1], scores[row : row + 1]).swapped_gap
            for row in range(left.shape[0])
        ]
    )


def _swapped_gap(scores: Float, lost: NDArray, won: NDArray) -> float:
    """Between the best id that only left chose and the worst that only right did; infinite when one may not be."""
    if len(lost) != len(won) or (len(won) and (won >= len(scores)).any()) or not np.isfinite(scores[won]).all():
        return np.inf
    # Equal scores are no gap, but then the smaller id must have been chosen: the order is total.
    if len(won) and scores[lost].max() == scores[won].min() and lost.min() < won.min():
        return np.inf
    return float(scores[lost].max() - scores[won].min()) if len(won) else 0.0


def end_distance(left: NDArray, right: NDArray, targets: NDArray) -> EndDistance:
    """Distance of two sets of logits.

    Args:
      left, right: [rows, V].
      targets: [rows] the prompt's next token of each row; -1 where there is none.
    """
    a, b = np.asarray(left, np.float64), np.asarray(right, np.float64)
    ours, theirs = log_probabilities(b), log_probabilities(a)
    divergence = np.maximum((np.exp(theirs) * (theirs - ours)).sum(axis=1), 0)
    norms = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    errors = np.linalg.norm(a - b, axis=1) / norms[0]
    known = np.flatnonzero(targets >= 0)
    picked = targets[known]
    return EndDistance(
        rows=len(a),
        logits_mean=float(errors.mean()),
        logits_max=float(errors.max()),
        max_abs=float(np.abs(a - b).max()),
        cosine=float(((a * b).sum(axis=1) / (norms[0] * norms[1])).mean()),
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
        top1=float((a.argmax(axis=1) == b.argmax(axis=1)).mean()),
        nll_left=float(-theirs[known, picked].mean()) if known.size else np.nan,
        nll_right=float(-ours[known, picked].mean()) if known.size else np.nan,
    )


def log_probabilities(logits: Float) -> Float:
    """[rows, V] logits to log-probabilities."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _finite(left: NDArray, right: NDArray) -> tuple[Float, Float, NDArray[np.bool_]]:
    """Both in float64 with what is not finite on both sides as zero, and where they are finite on one side only."""
    a, b = np.asarray(left, np.float64), np.asarray(right, np.float64)
    usable = np.isfinite(a) & np.isfinite(b)
    unlike = np.isfinite(a) != np.isfinite(b)
    return np.where(usable, a, 0.0), np.where(usable, b, 0.0), unlike
