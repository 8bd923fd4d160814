"""The ledger: what every approximation that serving may use costs, each one alone, against the float64 reference.

An approximation is measured where nothing else moves: in the reference with nothing rounded but it. What the runtime
computes is then held against the reference with the same approximations. The text is given (teacher forcing), so that
an early difference does not make later ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from v41jax.comparison.metrics import EndDistance, end_distance, log_probabilities
from v41jax.comparison.options import parse
from v41jax.comparison.replies import replies
from v41jax.comparison.subjects import Subject, open_subject
from v41jax.config import ModelConfig
from v41jax.precision import Precision

EXACT = "reference:dtype=float32,noquant"
RELEASED = "dtype=bfloat16,quant,packed"
DRAFTS = "drafts"
CHUNK = 64
"""Rows of a forward of the runtime: its programs stay small."""
DRAFT_PROMPT, DRAFT_TOKENS = 96, 32


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row.

    Attributes:
      key: of its budget.
      name: in the table.
      left, right: sides of a comparison; right may be `DRAFTS`, greedy replies with drafts against without.
    """

    key: str
    name: str
    left: str
    right: str

    @property
    def runs_jax(self) -> bool:
        """It compiles the model."""
        return any(not side.startswith("reference") for side in (self.left, self.right))


def _alone(parts: str, index_format: str = "fp4") -> str:
    return f"reference:dtype=float32,quant,index={index_format},only={parts}"


ENTRIES = (
    Entry("bf16_activations", "bfloat16 activations", EXACT, "reference:dtype=bfloat16,noquant"),
    Entry("bf16_scores", "bfloat16 index scores", EXACT, f"{EXACT},scores=bfloat16"),
    Entry("quantized_activations", "FP8 inputs of matrix products", EXACT, _alone("activations")),
    Entry("fp4_index", "FP4 index plane", EXACT, _alone("index")),
    Entry("fp8_index", "FP8 index plane", EXACT, _alone("index", "fp8")),
    Entry("fp4_main", "FP4 main rows", EXACT, _alone("main")),
    Entry("fp8_window", "FP8 windows", EXACT, _alone("window")),
    Entry("decoder_replay", "decoder replay", EXACT, f"{EXACT},replay=decoder"),
    Entry("encoder_replay", "encoder replay", EXACT, f"{EXACT},replay=encoder"),
    Entry("both_replays", "both replays", EXACT, f"{EXACT},replay=both"),
    Entry("released", "all roundings of serving, FP4 index", EXACT, "reference:dtype=bfloat16,quant,index=fp4"),
    Entry("released_fp8", "all roundings of serving, FP8 index", EXACT, "reference:dtype=bfloat16,quant,index=fp8"),
    Entry("xla", "runtime, nothing rounded", EXACT, f"xla:dtype=float32,noquant,chunks={CHUNK}"),
    Entry("xla_replay", "runtime, both replays", f"{EXACT},replay=both", "xla:dtype=float32,noquant,replay=both"),
    Entry(
        "xla_released",
        "runtime, packed, FP4 index",
        "reference:dtype=bfloat16,quant,index=fp4",
        f"xla:{RELEASED},index=fp4,chunks={CHUNK}",
    ),
    Entry(
        "xla_released_fp8",
        "runtime, packed, FP8 index",
        "reference:dtype=bfloat16,quant,index=fp8",
        f"xla:{RELEASED},index=fp8,chunks={CHUNK}",
    ),
    Entry("drafts", "drafts, five proposals a step", "xla:dtype=float32,noquant", DRAFTS),
)
BY_KEY = {entry.key: entry for entry in ENTRIES}


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one row costs.

    Attributes:
      entry: the row.
      end: distance of the logits; None of drafts.
      nll_error: standard error of `end.nll_change`, the mean over rows of the change.
      tokens, tokens_differing: of greedy replies, with drafts against without; zero elsewhere.
    """

    entry: Entry
    end: EndDistance | None
    nll_error: float = 0.0
    tokens: int = 0
    tokens_differing: int = 0


def measure(
    directory: Path,
    prompts: Sequence[NDArray[np.int32]],
    *,
    continuation: int,
    entries: Sequence[Entry] = ENTRIES,
    progress: Callable[[], None] | None = None,
) -> list[Measured]:
    """Measures rows on one checkpoint.

    Args:
      directory: checkpoint.
      prompts: token ids; under replay each must hold a page before its continuation.
      continuation: last tokens of a prompt, the ones measured under replay.
      entries: to measure.
      progress: called after each.

    Raises:
      ValueError: prompts that replay or drafts cannot be measured on.
    """
    sides = _Logits(directory, prompts, continuation)
    results = []
    for entry in entries:
        if entry.right == DRAFTS:
            results.append(_drafts(entry, directory, prompts))
        else:
            results.append(_distance(entry, sides(entry.left), sides(entry.right), prompts))
        if progress is not None:
            progress()
    return results


class _Logits:
    """Logits of every prompt by the text of a side, computed once."""

    def __init__(self, directory: Path, prompts: Sequence[NDArray[np.int32]], continuation: int):
        self._directory, self._prompts, self._continuation = directory, prompts, continuation
        self._known: dict[str, list[NDArray]] = {}

    def __call__(self, side: str) -> list[NDArray]:
        if side not in self._known:
            longest = max(len(ids) for ids in self._prompts)
            options = parse(side, Precision(jnp.float32, activation_quantization=False))
            subject: Subject = open_subject(self._directory, options, longest, self._continuation)
            try:
                self._known[side] = [subject.logits(ids) for ids in self._prompts]
            finally:
                subject.close()
        return self._known[side]


def _distance(
    entry: Entry, lefts: list[NDArray], rights: list[NDArray], prompts: Sequence[NDArray[np.int32]]
) -> Measured:
    """Over the rows that both sides have and whose next token is the prompt's."""
    pairs = []
    for left, right, ids in zip(lefts, rights, prompts, strict=True):
        # The last row of a whole prompt has no next token; replayed logits end before it.
        left, right = (side[: len(ids) - 1] for side in (left, right))
        count = min(len(left), len(right))
        pairs.append((left[-count:], right[-count:], ids[len(ids) - count :]))
    left, right, targets = (np.concatenate(column) for column in zip(*pairs, strict=True))
    change = np.take_along_axis(
        log_probabilities(np.asarray(left, np.float64)) - log_probabilities(np.asarray(right, np.float64)),
        targets[:, None],
        axis=1,
    )
    error = float(change.std(ddof=1)) / math.sqrt(len(change)) if len(change) > 1 else 0.0
    return Measured(entry, end_distance(left, right, targets), error)


def _drafts(entry: Entry, directory: Path, prompts: Sequence[NDArray[np.int32]]) -> Measured:
    proposals = ModelConfig.from_file(directory / "config.json").text.dspark_block_size
    heads = [ids[:DRAFT_PROMPT] for ids in prompts]
    plain, _ = replies(directory, heads, DRAFT_TOKENS, "float32", False, 0)
    drafted, _ = replies(directory, heads, DRAFT_TOKENS, "float32", False, proposals)
    differing = sum(one != other for pair in zip(plain, drafted, strict=True) for one, other in zip(*pair, strict=True))
    return Measured(entry, None, tokens=len(heads) * DRAFT_TOKENS, tokens_differing=differing)
