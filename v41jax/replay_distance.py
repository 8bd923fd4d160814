"""How far bounded replay moves the model's answers from those of a full prefill, measured prompt by prompt.

A prompt is prefilled up to a cut in each mode, planned as the scheduler plans it; then its last tokens are fed on top
of whatever rings the mode left, as decode steps would. All logits are compared with those of a full prefill.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.model_view import ModelView
from scheduler.planning import ChunkRules, plan_chunk, replay_fields
from scheduler.pools import Pools, allocate
from v41jax.config import ModelConfig
from v41jax.engram_hashing import history_before
from v41jax.full_forward import ROW_BUCKETS, LoadedModel, compressed_of, engram_rows_of, step
from v41jax.reference.records import SequenceState
from v41jax.reference.replay_oracle import ReplayForward, ReplayOracle, reused_prefix
from v41jax.spans import Span, batch_of

Logits = NDArray[np.float64]

_FULL, _REPLAYED = 0, 1
"""Slots: of the request that fills the cache, and of the one that is measured."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way to prefill.

    Attributes:
      name: in reports.
      hit: the prompt's whole pages below the cut are reused, and the encoder's windows rebuilt from the last of them.
      tail: the decoder runs on the last window only.
      small_chunks: the prompt is cut into the smallest chunks that the modes allow.
    """

    name: str
    hit: bool = False
    tail: bool = False
    small_chunks: bool = False


FULL = Mode("full")
MODES = (
    FULL,
    Mode("full in chunks", small_chunks=True),
    Mode("decoder replay", tail=True),
    Mode("encoder replay", hit=True),
    Mode("both replays", hit=True, tail=True),
)
"""The second one is exact too: its distance is the noise of the arithmetic."""
MODES_BY_SIDE = {mode.name.split()[0]: mode for mode in MODES if mode.hit or mode.tail}
"""The replays by the name that a side of a comparison gives them."""


@dataclasses.dataclass(frozen=True)
class Distance:
    """One mode against full prefill, over all measured rows of all prompts.

    Attributes:
      mode: name of the mode.
      prompts: that the mode applies to; a prompt without a whole page below its cut has no hit.
      rows: logits compared.
      logits_mean, logits_max: relative L2 distance of a row's logits.
      kl_mean, kl_max: divergence of the mode's distribution from the full prefill's, in nats.
      top1: share of rows with the same most likely token.
      nll: mean negative log-likelihood of the prompt's own next token.
      nll_full: same of the full prefill on the same rows.
      oracle_max: largest relative L2 distance of a row's logits from what the dense float64 oracle makes of the same
        forwards; None where no oracle ran.
    """

    mode: str
    prompts: int
    rows: int
    logits_mean: float
    logits_max: float
    kl_mean: float
    kl_max: float
    top1: float
    nll: float
    nll_full: float
    oracle_max: float | None = None


def replay_page(config: ModelConfig) -> int:
    """The smallest page that replay allows: whole candidate blocks, and no shorter than a window."""
    text = config.text
    block = text.candidate_block_size if text.candidate_source_layer_id >= 0 else 1
    unit = math.lcm(32, *(ratio * block for _, ratio in config.owners))
    return -(-text.sliding_window // unit) * unit


def measure_replay(
    model: LoadedModel,
    prompts: Sequence[NDArray[np.int32]],
    *,
    continuation: int = 16,
    modes: Sequence[Mode] = MODES,
    oracle: ReplayOracle | None = None,
    progress: Callable[[], None] | None = None,
) -> list[Distance]:
    """Measures every mode on every prompt.

    Args:
      model: loaded with a page of at least the window (`replay_page`).
      prompts: token ids, each at least two.
      continuation: last tokens of each prompt that are fed one after the other instead of prefilled.
      modes: to measure; the full prefill is always run.
      oracle: of the same weights; runs every forward of every mode beside the model.
      progress: called after each prompt.

    Raises:
      ValueError: prompts or pages that nothing can be measured on.
    """
    _check_model(model, prompts, continuation)
    collected: dict[str, list[_Measured]] = {mode.name: [] for mode in modes}
    for ids in prompts:
        cut = len(ids) - min(continuation, len(ids) - 1)
        session = _Session(model, ids, cut, oracle)
        expected, exact = session.logits(FULL)
        for mode in modes:
            if not mode.hit or session.hit:
                given, dense = (expected, exact) if mode == FULL else session.logits(mode)
                collected[mode.name].append(_Measured(given, expected, dense, ids[cut:]))
        if progress is not None:
            progress()
    return [_distance(name, parts) for name, parts in collected.items() if parts]


def continuation_logits(model: LoadedModel, ids: NDArray[np.int32], mode: Mode, continuation: int) -> Logits:
    """Logits of the last rows of one prompt, prefilled in one mode up to them and then fed token by token.

    Args:
      model: as for `measure_replay`.
      ids: token ids, at least two.
      mode: of the prefill.
      continuation: last tokens that are fed instead of prefilled.

    Returns:
      [rows, V], of positions n - 1 - rows .. n - 2; rows is `continuation` or n - 1.

    Raises:
      ValueError: what `measure_replay` refuses, or a prompt without a whole page below its cut in a mode with a hit.
    """
    _check_model(model, [ids], continuation)
    cut = len(ids) - min(continuation, len(ids) - 1)
    session = _Session(model, ids, cut, None)
    if mode.hit:
        _check_hit(mode, cut, session.block)
        session.logits(FULL)
    return session.logits(mode)[0]


def reference_continuation_logits(
    oracle: ReplayOracle, ids: NDArray[np.int32], mode: Mode, continuation: int, max_model_len: int
) -> Logits:
    """What `continuation_logits` gives, by the dense float64 oracle alone; arguments and errors as there."""
    config = oracle.model.config
    block = replay_page(config)
    _check(config, block, max_model_len, [ids], continuation)
    cut = len(ids) - min(continuation, len(ids) - 1)
    state, rows = None, []
    if mode.hit:
        _check_hit(mode, cut, block)
        whole = oracle.model.forward(ids[:cut], record=False)
        state = reused_prefix(whole.state, (cut - 1) // block * block, dict(config.owners))
    planned = planned_forwards(mode, len(ids), cut, block, oracle.window, forward_rows(max_model_len, block))
    for forward in planned:
        output = oracle.forward(ids[forward.start : forward.end], state, forward)
        state = output.state
        if forward.is_final:
            rows.append(output.logits if forward.start == cut else output.logits[-1:])
    return np.concatenate(rows)


def forward_rows(max_model_len: int, block: int) -> int:
    """Rows of every prefill forward; the same for every prompt, so that all share their programs."""
    return max(_bucket(min(max_model_len, ROW_BUCKETS[-1])), 2 * block)


def planned_forwards(mode: Mode, length: int, cut: int, block: int, window: int, rows: int) -> list[ReplayForward]:
    """The forwards of one prompt in one mode, as the scheduler plans them, and the one of its last tokens.

    Args:
      mode: of the prefill.
      length: tokens of the prompt; the last one is not fed.
      cut: end of the prefill.
      block: tokens of a page.
      window: attention window.
      rows: most rows of a forward.
    """
    position = (cut - 1) // block * block if mode.hit else 0
    rules = ChunkRules(block, min_final_rows=window if mode.tail else 0)
    budget = 2 * block if mode.small_chunks else rows
    rebuild, forwards = mode.hit, []
    while position < cut:
        plan = plan_chunk(position, cut, budget, True, rebuild, rules)
        assert plan is not None, "a lone request always makes progress with two pages of rows"
        forwards.append(ReplayForward(plan.start, position, plan.end, plan.is_final, rebuild, mode.tail))
        position, rebuild = plan.end, False
    if length - 1 > cut:
        forwards.append(ReplayForward(cut, cut, length - 1))
    return forwards


def _check_hit(mode: Mode, cut: int, block: int) -> None:
    if cut <= block:
        raise ValueError(f"{mode.name}: no whole page of {block} tokens in the first {cut} tokens to reuse")


def _check_model(model: LoadedModel, prompts: Sequence[NDArray[np.int32]], continuation: int) -> None:
    _check(model.setup.config, model.setup.geometry.block_size, model.max_model_len, prompts, continuation)


def _check(
    config: ModelConfig, block: int, max_model_len: int, prompts: Sequence[NDArray[np.int32]], continuation: int
) -> None:
    obstacle = ModelView.from_config(config).decoder_replay_obstacle()
    faults = [] if obstacle is None else [f"the decoder of this model cannot be replayed: {obstacle}"]
    if block < config.text.sliding_window:
        faults.append(f"pages of {block} tokens are shorter than the window, {config.text.sliding_window}")
    if continuation < 1:
        faults.append(f"a continuation of {continuation} tokens has no row to compare, at least 1 is needed")
    for number, ids in enumerate(prompts):
        if not 2 <= len(ids) <= max_model_len:
            faults.append(f"prompt {number} has {len(ids)} tokens, must be 2..{max_model_len}")
    if not prompts:
        faults.append("no prompt to measure on")
    if faults:
        raise ValueError("; ".join(faults))


class _Measured(NamedTuple):
    """One prompt in one mode; all logits are [rows, V]."""

    given: Logits
    expected: Logits
    oracle: Logits | None
    targets: NDArray[np.int32]


class _Session:
    """One prompt over pools that hold two requests: a full prefill, whose pages hits reuse, and the measured one."""

    def __init__(self, model: LoadedModel, ids: NDArray[np.int32], cut: int, oracle: ReplayOracle | None):
        self.model, self.ids, self.cut, self.oracle = model, ids, cut, oracle
        self.prefilled: SequenceState | None = None
        geometry = model.setup.geometry
        self.compressed = compressed_of(model.lookup, ids, None)
        self.block = geometry.block_size
        self.pages = geometry.pages_for(model.max_model_len)
        self.rows = forward_rows(model.max_model_len, self.block)
        self.hit = (cut - 1) // self.block * self.block
        self.pools: Pools = allocate(geometry, 2 * self.pages, 2)

    def logits(self, mode: Mode) -> tuple[Logits, Logits | None]:
        """[len(ids) - cut, V]: rows cut - 1 .. len(ids) - 2, of the model and of the oracle."""
        own = range(self.pages, 2 * self.pages)
        slot, pages = (_FULL, range(self.pages)) if mode == FULL else (_REPLAYED, own)
        if mode.hit:
            shared = self.hit // self.block
            pages = [*range(shared), *own[shared:]]
        window = self.model.setup.geometry.window_size
        forwards = planned_forwards(mode, len(self.ids), self.cut, self.block, window, self.rows)
        rows = []
        for forward in forwards:
            start, end = forward.start, forward.end
            if start == self.cut:
                rows.append(self._forward(start, end, slot, pages, False, True, continuation=True))
                continue
            fields = replay_fields(start, forward.resume, forward.rebuild)._asdict()
            made = self._forward(start, end, slot, pages, mode.tail, forward.is_final, **fields)
            if forward.is_final:
                rows.append(made)
        return np.concatenate(rows), self._oracle_logits(mode, forwards)

    def _oracle_logits(self, mode: Mode, forwards: list[ReplayForward]) -> Logits | None:
        """What the oracle makes of the forwards of one mode: the last row of the prefill, every row after it."""
        if self.oracle is None:
            return None
        state = None
        if mode.hit:
            assert self.prefilled is not None, "the full prefill runs first"
            state = reused_prefix(self.prefilled, self.hit, dict(self.model.setup.geometry.owners))
        rows = []
        for forward in forwards:
            output = self.oracle.forward(self.ids[forward.start : forward.end], state, forward)
            state = output.state
            if forward.is_final:
                rows.append(output.logits if forward.start == self.cut else output.logits[-1:])
        if mode == FULL:
            self.prefilled = state
        return np.concatenate(rows)

    def _forward(
        self,
        start: int,
        end: int,
        slot: int,
        pages: Sequence[int],
        tail: bool,
        is_final: bool,
        continuation: bool = False,
        **fields: int,
    ) -> Logits:
        """Logits of the last row of a final prefill forward, of none of another, of every row of a continuation."""
        setup, count = self.model.setup, end - start
        span = Span(
            start,
            self.ids[start:end],
            self.compressed[start:end],
            slot,
            pages,
            history_before(self.compressed, start, setup.geometry.history_size),
            is_final=is_final,
            **fields,  # type: ignore[arg-type]
        )
        rows = _bucket(count) if continuation else self.rows
        wanted = range(count) if continuation else [count - 1] if is_final else []
        batch = batch_of(
            [span],
            setup.geometry,
            rows=rows,
            columns=self.pages,
            output_rows=wanted,
            outputs=rows if continuation else 1 if is_final or not tail else 0,
            decoder_replay=tail,
        )
        self.pools, output = step(
            self.model.params,
            self.pools,
            batch,
            engram_rows_of(setup, self.model.lookup, batch),
            setup=setup,
            phase="prefill",
        )
        return np.asarray(output.logits, np.float64)[: len(wanted)]


def _bucket(rows: int) -> int:
    return next((bucket for bucket in ROW_BUCKETS if bucket >= rows), rows)


def _distance(name: str, parts: list[_Measured]) -> Distance:
    given, expected, targets = (
        np.concatenate([getattr(part, column) for part in parts]) for column in ("given", "expected", "targets")
    )
    dense = [part.oracle for part in parts if part.oracle is not None]
    ours, theirs = _log_probabilities(given), _log_probabilities(expected)
    norms = _relative(given, expected)
    divergence = np.maximum((np.exp(theirs) * (theirs - ours)).sum(axis=1), 0)
    rows = np.arange(len(targets))
    return Distance(
        mode=name,
        prompts=len(parts),
        rows=len(targets),
        logits_mean=float(norms.mean()),
        logits_max=float(norms.max()),
        kl_mean=float(divergence.mean()),
        kl_max=float(divergence.max()),
        top1=float((given.argmax(axis=1) == expected.argmax(axis=1)).mean()),
        nll=float(-ours[rows, targets].mean()),
        nll_full=float(-theirs[rows, targets].mean()),
        oracle_max=float(_relative(given, np.concatenate(dense)).max()) if dense else None,
    )


def _relative(given: Logits, expected: Logits) -> NDArray[np.float64]:
    return np.linalg.norm(given - expected, axis=1) / np.linalg.norm(expected, axis=1)


def _log_probabilities(logits: Logits) -> Logits:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
