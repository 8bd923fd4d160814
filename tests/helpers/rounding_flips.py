"""Tracing a quantized run that departs from another one to the single values that were rounded the other way.

Two correct float32 implementations with activation quantization agree until one value lies so near a rounding
boundary that their noise puts it on different sides. `FlipProbe` finds such values in a reference run and can move
them across; `explain` names the ones that turn the reference's answers into the other implementation's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Quantize = Callable[[NDArray[np.float64]], NDArray[np.float64]]

FLOAT32_NOISE = 4e-7
"""Distance to a boundary that float32 noise covers, in units of (magnitude + root mean square of the vector): about
three units in the last place. The golden streams themselves differ from float64 by up to 2e-6."""

EXPLAINED = 3e-4
"""A flip explains a row that it brings this close. Flips were seen to move logits by 0.04 and more; the right one left
at most 1.4e-4, in the row where it happens, and 5e-6 in all rows after it."""


@dataclasses.dataclass(frozen=True)
class Flip:
    """One value moved across a rounding boundary.

    Attributes:
      site: the quantizer, such as `layers.3.ffn_input`.
      index: flat index into the array that the site quantizes.
      move: added to the value before quantization; it lies within |move| of a boundary.
    """

    site: str
    index: int
    move: float


class FlipProbe:
    """A `probe` of the reference model that applies flips and, on request, looks for values that could flip."""

    def __init__(self) -> None:
        self.flips: tuple[Flip, ...] = ()
        self._noise: float | None = None
        self._wanted: tuple[str, int] | None = None
        self._found: list[Flip] = []

    def __call__(self, site: str, x: NDArray[np.float64], quantize: Quantize) -> NDArray[np.float64]:
        for flip in self.flips:
            if flip.site == site:
                x = x.copy()
                x.reshape(-1)[flip.index] += flip.move
        quantized = quantize(x)
        if self._noise is None:
            return quantized
        reach = self._noise * (np.abs(x) + np.sqrt(np.mean(x * x, axis=-1, keepdims=True)))
        for move in (reach, -reach):
            if self._wanted is None:
                indices = np.flatnonzero(quantize(x + move) != quantized)
            else:
                indices = [self._wanted[1]] if self._wanted[0] == site else []
            # Moving everything may shift a block's scale; only a value that crosses alone is one that can flip.
            self._found += [
                Flip(site, int(index), float(move.reshape(-1)[index]))
                for index in indices
                if _crosses(x, index, move.reshape(-1)[index], quantize)
            ]
        return quantized

    def collect(self, run: Callable[[], object], noise: float, only: tuple[str, int] | None = None) -> list[Flip]:
        """Runs with the present flips and returns every value within `noise` of a boundary, in order of execution.

        Args:
          only: (site, index) of the one value to look at.
        """
        self._noise, self._wanted, self._found = noise, only, []
        try:
            run()
        finally:
            self._noise = None
        return self._found


def _crosses(x: NDArray[np.float64], index: int, move: float, quantize: Quantize) -> bool:
    row = x.reshape(-1, x.shape[-1])[index // x.shape[-1]].copy()
    before = quantize(row)
    row[index % x.shape[-1]] += move
    return bool((quantize(row) != before).any())


def departing_rows(ours: NDArray, theirs: NDArray, tolerance: float) -> NDArray[np.intp]:
    """Rows whose largest absolute difference exceeds `tolerance`, ascending."""
    difference = np.abs(np.asarray(ours, np.float64) - theirs)
    return np.flatnonzero(difference.reshape(difference.shape[0], -1).max(axis=1) > tolerance)


def explain(
    probe: FlipProbe,
    run: Callable[[int], NDArray[np.float64]],
    theirs: NDArray,
    *,
    first_row: int = 0,
    likely: Iterable[tuple[str, int]] = (),
    tolerance: float = 1e-3,
    explained: float = EXPLAINED,
    noise: float = FLOAT32_NOISE,
    flips_per_row: int = 1,
) -> tuple[Flip, ...]:
    """The flips that turn a reference run into the other implementation's, found one departing row at a time.

    Args:
      probe: the probe of the model that `run` uses; holds the flips afterwards.
      run: number of leading rows -> their logits, [rows, V].
      theirs: [n - first_row, V], the other implementation's logits from row `first_row` on.
      likely: (site, index) in the order in which they are needed; tried first, so that known flips cost no search. A
        row may need several of these, and only one that is searched for.
      tolerance: a row departs beyond this.
      explained: a flip explains a row that comes within this, and within `tolerance`.
      noise: no value farther from a boundary is considered.
      flips_per_row: a row may need this many that no earlier row showed, each the one that helps most.

    Returns:
      The flips, in the order found; empty when nothing departs.

    Raises:
      AssertionError: a departing row that no value within `noise` of a boundary explains.
    """
    explained = min(explained, tolerance)
    remaining = list(likely)
    probe.flips = ()
    while True:
        departing = departing_rows(run(first_row + theirs.shape[0])[first_row:], theirs, tolerance)
        if not departing.size:
            return probe.flips
        row, settled = int(departing[0]), probe.flips
        stop = first_row + row + 1

        def difference(flips: tuple[Flip, ...], stop: int = stop, row: int = row) -> float:
            probe.flips = flips
            return float(np.abs(run(stop)[-1] - theirs[row]).max())

        def near(only: tuple[str, int] | None = None, stop: int = stop) -> list[Flip]:
            return sorted(probe.collect(lambda: run(stop), noise, only), key=lambda flip: abs(flip.move))

        if _apply_known(probe, remaining, near, difference, explained):
            continue
        probe.flips = settled
        candidates = near()
        for _ in range(flips_per_row):
            known = probe.flips
            best = (np.inf, known)
            for candidate in candidates:
                best = min(best, (difference((*known, candidate)), (*known, candidate)), key=lambda pair: pair[0])
                if best[0] < explained:
                    break
            probe.flips = best[1]
            if best[0] < explained:
                break
            candidates = near()
        else:
            raise AssertionError(
                f"row {first_row + row} departs by {difference(settled):.2e} and no {flips_per_row} of the "
                f"{len(candidates)} values within {noise:.1e} of a rounding boundary explain it"
            )


def _apply_known(
    probe: FlipProbe,
    remaining: list[tuple[str, int]],
    near: Callable[[tuple[str, int]], list[Flip]],
    difference: Callable[[tuple[Flip, ...]], float],
    explained: float,
) -> bool:
    """Applies leading entries of `remaining`, and takes them out, until the row is explained; False leaves them all."""
    for count, place in enumerate(remaining, start=1):
        found = near(place)
        if not found:
            return False
        if difference((*probe.flips, found[0])) < explained:
            del remaining[:count]
            return True
    return False
