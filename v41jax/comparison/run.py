"""One comparison: two sides, some prompts, layer by layer and end to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from v41jax.comparison.bisect import Bisection, Comparison, Departure, Flip, Tolerances, bisect, tolerances
from v41jax.comparison.metrics import EndDistance, end_distance
from v41jax.comparison.options import Options
from v41jax.comparison.recording import Recording
from v41jax.comparison.subjects import RecordedSubject, Subject
from v41jax.precision import Precision

FORCED, FREE = "forced", "free"
MODES = (FORCED, FREE)


@dataclasses.dataclass
class Result:
    """A whole comparison.

    Attributes:
      left, right: the sides as they were asked for.
      mode: "forced" (right's layers read left's inputs) or "free".
      prompts: lengths.
      end: logits, free running, over all prompts; None where a side has none.
      rows: relative L2 distance of the logits of each compared row, prompt by prompt.
      layers: one bisection a prompt; empty without layers.
      recording: right's tensors of the first prompt.
    """

    left: Options
    right: Options
    mode: str
    prompts: list[int]
    end: EndDistance | None
    rows: list[NDArray[np.float64]]
    layers: list[Bisection]
    recording: Recording | None = None

    @property
    def first(self) -> Departure | None:
        """The earliest departure of any prompt."""
        found = [bisection.first for bisection in self.layers if bisection.first is not None]
        return min(found, key=lambda departure: departure.layer) if found else None

    @property
    def flips(self) -> list[Flip]:
        """Of all prompts."""
        return [flip for bisection in self.layers for flip in bisection.flips]

    def worst(self) -> list[Comparison]:
        """Per layer and operation the comparison of the prompt where it is farthest."""
        best: dict[tuple[int, str], Comparison] = {}
        for bisection in self.layers:
            for item in bisection.comparisons:
                key = (item.layer, item.operation)
                if key not in best or _distance(item) > _distance(best[key]):
                    best[key] = item
        return list(best.values())


def _distance(item: Comparison) -> float:
    return item.values.relative_l2 if item.values is not None else 1 - item.sets.overlap if item.sets else 0.0


def compare(
    left: Subject,
    right: Subject,
    prompts: Sequence[NDArray[np.int32]],
    *,
    mode: str = FORCED,
    layers: bool = True,
    end: bool = True,
    until: int | None = None,
    allowed: Tolerances | None = None,
    progress: Callable[[], None] | None = None,
) -> Result:
    """Compares two sides on some prompts.

    Args:
      left: whose inputs are fed to right's layers when forced.
      right: the other side.
      prompts: token ids.
      mode: see `Result`.
      layers: compare layer by layer.
      end: compare the logits of both sides running free.
      until: compare the first so many layers, and neither head nor logits; None is all.
      allowed: of the layers; None takes the defaults of the two precisions.
      progress: called after each prompt.

    Raises:
      ValueError: prompts that a recording does not hold, a recording that nothing can be fed from, or layers of a
        side that runs bounded replay.
    """
    precision = coarser(left.options, right.options)
    allowed = tolerances(left.options.precision, right.options.precision) if allowed is None else allowed
    unobserved = [side.options.text for side in (left, right) if side.options.logits_only]
    if layers and unobserved:
        raise ValueError(
            f"{', '.join(unobserved)}: under bounded replay and on a mesh no layer is observed, compare the logits only"
        )
    bisections, pairs, first = [], [], None
    for ids in prompts:
        if layers:
            given = left.observe(ids, until=until)
            forced = given if mode == FORCED else None
            if forced is not None and forced.layer_inputs is None:
                raise ValueError(f"{left.options.text}: no layer inputs to feed, it has no pre_mix: use --mode free")
            made = right.observe(ids, forced, until=until)
            index_format = right.options.index_format
            bisections.append(bisect(given, made, left.config, precision, allowed, index_format))
            first = made if first is None else first
        if end and until is None and not _lacks_logits(left, right):
            pairs.append((left.logits(ids), right.logits(ids), ids))
        if progress is not None:
            progress()
    distance, rows = _ends(pairs, left.options.replay or right.options.replay) if pairs else (None, [])
    return Result(left.options, right.options, mode, [len(ids) for ids in prompts], distance, rows, bisections, first)


def coarser(left: Options, right: Options) -> Precision:
    """The precision whose roundings both sides are compared under."""
    one, other = left.precision, right.precision
    coarse = one if one.activation_dtype == jnp.bfloat16 else other
    return dataclasses.replace(
        coarse, activation_quantization=one.activation_quantization and other.activation_quantization
    )


def _lacks_logits(*sides: Subject) -> bool:
    return any(isinstance(side, RecordedSubject) and side.recording.logits is None for side in sides)


def _ends(
    pairs: list[tuple[NDArray, NDArray, NDArray[np.int32]]], replay: str | None
) -> tuple[EndDistance, list[NDArray[np.float64]]]:
    lefts, rights, targets, rows = [], [], [], []
    for left, right, ids in pairs:
        next_token = np.append(ids[1:], -1)
        if replay is not None:
            # A replayed prompt has logits up to its last token but one.
            left, right = (side[:-1] if len(side) == len(ids) else side for side in (left, right))
            next_token = next_token[:-1]
        count = min(len(left), len(right))
        left, right = np.asarray(left[-count:], np.float64), np.asarray(right[-count:], np.float64)
        lefts.append(left)
        rights.append(right)
        targets.append(next_token[-count:])
        rows.append(np.linalg.norm(left - right, axis=1) / np.linalg.norm(left, axis=1))
    return end_distance(np.concatenate(lefts), np.concatenate(rights), np.concatenate(targets)), rows
