"""The phases of a run: what each starts from, how long it goes on by the clock, and what it leaves.

A phase ends when its seconds are over, compilation and saving included, so that it always fits its call; called again
it goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from training import baseline, draft, objective
from training.backbone import Narrowing, Setup, backbone, head, released_narrowing, whole
from training.baseline import BaselineConfig, baseline_logits
from training.configuration import configuration
from training.data import BEGIN, NOISE, byte_lengths, load_stream
from training.evaluation import acceptance, bits_per_byte, held_out_windows
from training.export import export
from training.generation import generate
from training.hashing import hash_tables
from training.objective import Constants, Schedule
from training.optimizer import TrainState, start, update
from training.states import Log, States, load_snapshot, save_snapshot, snapshot_step
from training.weights import Masters, initial_masters, serving_weights
from v41jax.layers.rope import RopeTable, build_table, plain_frequencies, yarn_frequencies
from v41jax.protocol.tokens import IMAGE
from v41jax.token_map import build_token_map

Array = jax.Array
Step = Callable[[TrainState, Any, Schedule], tuple[TrainState, Array]]

SAVE_EVERY_S = 120.0
ENDING_S = 12.0
"""Kept free at the end of a phase for its last state."""
WARM_UP_STEPS = 200
NARROW_FROM, NARROW_TO = 0.10, 0.35
"""Part of the first phase in which selection narrows from everything to the released size."""
PROMPT = 64
"""Held-in tokens before a generated continuation."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Of a run.

    Attributes:
      data: what `training.data` prepared.
      out: states, snapshots, logs and results.
      seconds: of a phase, by its name; the others take their own.
      batch: sequences of a step.
      length: tokens of a sequence.
      rate: highest learning rate.
      inner: steps of one call from the host.
      generated: continuations made for the draft.
      windows: most held-out windows that are measured.
      toy: the small configuration.
      seed: of everything random.
    """

    data: Path
    out: Path
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    batch: int = 32
    length: int = 1024
    rate: float = 2e-3
    inner: int = 10
    generated: int = 2048
    windows: int = 512
    toy: bool = False
    seed: int = 0


class Run:
    """A run's constants, and its phases as methods of the same names.

    Args of the constructor:
      options: of the run.
    """

    def __init__(self, options: Options):
        self.options = options
        options.out.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer.from_file(str(options.data / "tokenizer.json"))
        token_map = build_token_map(tokenizer)
        size = tokenizer.get_vocab_size()
        self.config = configuration(
            size,
            int(token_map.max()) + 1,
            image_token=tokenizer.token_to_id(IMAGE),
            noise_token=tokenizer.token_to_id(NOISE),
            toy=options.toy,
        )
        self.setup = Setup(self.config)
        self.baseline_config = BaselineConfig(size, *((64, 2, 2, 96) if options.toy else ()))
        text = self.config.text
        positions = 2 * options.length
        half = self.baseline_config.hidden_size // self.baseline_config.heads
        self.baseline_table = _table(plain_frequencies(10000.0, half), positions)
        self.constants = Constants(
            jnp.asarray(load_stream(options.data, "train")),
            hash_tables(self.config, token_map),
            _table(plain_frequencies(text.rope_theta, text.qk_rope_head_dim), positions),
            _table(yarn_frequencies(text), positions),
        )
        self.held_out = load_stream(options.data, "heldout")
        self.byte_lengths = byte_lengths(tokenizer)
        self.log = Log(options.out / "log.jsonl")
        self._ended: dict[str, TrainState] = {}

    # ---- phases -------------------------------------------------------------------------------------------------

    def target(self) -> None:
        """First phase of the target: constant rate, selection narrowing from everything to the released size."""
        self._train("target", lambda: self._masters(("text",)), self._target_step, self._first_schedule, 480)

    def baseline(self) -> None:
        """First phase of the dense baseline."""
        masters = functools.partial(baseline.initial_masters, self.baseline_config, self.options.seed)
        self._train("baseline", masters, self._baseline_step, self._first_schedule, 480)

    def replay(self) -> None:
        """Last phase of the target: falling rate, windows rebuilt in half of the sequences."""
        self._train(
            "replay", lambda: self._carried("target"), self._target_step, self._last_schedule, 150, carried="target"
        )

    def cooldown(self) -> None:
        """Last phase of the baseline: falling rate."""
        self._train(
            "cooldown",
            lambda: self._carried("baseline"),
            self._baseline_step,
            self._last_schedule,
            150,
            carried="baseline",
        )

    def matched(self) -> None:
        """The dense baseline on exactly the batches the target saw, in their order, however little time that takes."""
        snapshots = self.options.out / "snapshots"
        last, total = snapshot_step(snapshots, "target"), snapshot_step(snapshots, "replay")

        def schedule(fraction: float, step: int) -> Schedule:
            first = self._first_schedule(1.0, step)
            falling = max(1.0 - max(step - last, 0) / max(total - last, 1), 0.02)
            return first._replace(rate=first.rate * falling)

        masters = functools.partial(baseline.initial_masters, self.baseline_config, self.options.seed)
        self._train("matched", masters, self._baseline_step, schedule, 1e9, steps=total)

    def draft(self) -> None:
        """The draft stages, Markov head and confidence head, from the frozen target."""
        generated = self._generated(self.constants.stream, self.options.generated, self.options.seed + 1)
        teacher = Teacher(self.constants, self._frozen(), generated)
        step = functools.partial(
            draft_step, setup=self.setup, batch=self.options.batch, length=self.options.length // 2
        )
        self._train("draft", lambda: self._masters(("draft",)), step, self._draft_schedule, 150, constants=teacher)

    def export(self) -> None:
        """`nano/` under the output directory, in the released layout."""
        masters = {**self._carried("replay"), **self._carried("draft")}
        directory = self.options.out / "nano"
        if directory.is_dir():
            shutil.rmtree(directory)
        export(directory, self.config, masters, self.options.data / "tokenizer.json")
        size = sum(path.stat().st_size for path in directory.iterdir())
        self.log(phase="export", directory=str(directory), bytes=size)

    def evaluate(self) -> None:
        """Held-out bits per byte of target and baseline after each of their phases, to `evaluation.json`."""
        results: dict[str, Any] = {}
        for phase in ("target", "replay"):
            results[phase] = self._held_out(phase, self._target_nats)
        for phase in ("baseline", "cooldown", "matched"):
            results[phase] = self._held_out(phase, self._baseline_nats)
        self._report("evaluation", results)

    def acceptance(self) -> None:
        """Tokens a step of the draft along continuations of held-out prompts, to `acceptance.json`."""
        generated = self._generated(jnp.asarray(self.held_out), min(256, self.options.generated), self.options.seed + 2)
        frozen = {**self._frozen(), **self._draft_weights(self._carried("draft"))}
        self._report("acceptance", acceptance(frozen, generated, self._prompt, self.constants, setup=self.setup))

    def _report(self, name: str, results: dict[str, Any]) -> None:
        self.log(phase=name, **results)
        (self.options.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    # ---- schedules ----------------------------------------------------------------------------------------------

    def _first_schedule(self, fraction: float, step: int) -> Schedule:
        text, length = self.config.text, self.options.length
        part = min(max((fraction - NARROW_FROM) / (NARROW_TO - NARROW_FROM), 0.0), 1.0)
        topk = round(length * (text.index_topk / length) ** part)
        most = -(-length // text.candidate_block_size)
        blocks = round(most * (text.candidate_topk_blocks / most) ** part)
        rate = self.options.rate * min(1.0, (step + 1) / WARM_UP_STEPS)
        return _schedule(rate, topk, blocks, 0.0)

    def _last_schedule(self, fraction: float, step: int) -> Schedule:
        text = self.config.text
        rate = self.options.rate * max(1.0 - fraction, 0.02)
        return _schedule(rate, text.index_topk, text.candidate_topk_blocks, 0.5)

    def _draft_schedule(self, fraction: float, step: int) -> Schedule:
        rate = self.options.rate * min(1.0, (step + 1) / WARM_UP_STEPS) * max(1.0 - fraction, 0.02)
        return _schedule(rate, self.config.text.index_topk, self.config.text.candidate_topk_blocks, 0.0)

    # ---- one phase ----------------------------------------------------------------------------------------------

    def _train(
        self,
        phase: str,
        masters: Callable[[], Masters],
        step: Step,
        schedule: Callable[[float, int], Schedule],
        seconds: float,
        carried: str | None = None,
        constants: Any = None,
        steps: int | None = None,
    ) -> None:
        """Steps until the phase's seconds are over, or as many as stated; the state of `carried` is taken along."""
        options = self.options
        seconds = seconds if steps is not None else options.seconds.get(phase, seconds)
        began = time.perf_counter()
        states = States(options.out / "states" / phase)
        state = start(masters(), options.seed)
        if carried:
            step_before = snapshot_step(options.out / "snapshots", carried)
            state = state._replace(step=jnp.asarray(step_before, jnp.int32))
        state = states.newest(state) or (self._state_of(carried, state) if carried else None) or state
        constants = self.constants if constants is None else constants
        if phase in ("baseline", "cooldown", "matched"):
            constants = constants._replace(plain=self.baseline_table)

        several = _several(step, options.inner)
        count = first = int(state.step)
        saved = logged = time.perf_counter()
        pending: list[tuple[int, Schedule, Array]] = []
        longest = 0.0
        warm, compiled = False, began
        while True:
            now = time.perf_counter()
            if count > first and now - began + longest + ENDING_S > seconds:
                break
            if steps is not None and count >= steps:
                break
            # Compilation is not training: the schedule's clock starts after it.
            fraction = (now - compiled) / max(seconds - ENDING_S - (compiled - began), 1.0) if warm else 0.0
            current = schedule(min(fraction, 1.0), count)
            state, metrics = several(state, constants, current)
            count += options.inner
            pending.append((count, current, metrics))
            if len(pending) > 1 or not warm:
                number, used, values = pending.pop(0)
                values = np.asarray(values)
                if warm:
                    longest = max(longest, time.perf_counter() - now)
                else:
                    compiled = time.perf_counter()
                warm = True
                if time.perf_counter() - logged > 5 or number <= first + options.inner:
                    logged = time.perf_counter()
                    self._log_step(phase, number, used, values, logged - began)
            if time.perf_counter() - saved > SAVE_EVERY_S:
                states.save(state)
                saved = time.perf_counter()
        for number, used, values in pending:
            self._log_step(phase, number, used, np.asarray(values), time.perf_counter() - began)
        save_snapshot(options.out / "snapshots", phase, state.masters, count)
        states.save(state)
        states.close()
        self._ended = {phase: state}
        self.log(phase=phase, done=True, steps=count, elapsed=round(time.perf_counter() - began, 1))

    def _log_step(self, phase: str, step: int, schedule: Schedule, values: np.ndarray, elapsed: float) -> None:
        first, second, third = (round(float(value), 5) for value in values)
        names = ("loss", "tokens_a_step", "confidence_loss") if phase == "draft" else ("loss", "index_loss", "load")
        self.log(
            phase=phase,
            step=step,
            elapsed=round(elapsed, 2),
            tokens=step * self.options.batch * self.options.length,
            rate=float(schedule.rate),
            topk=int(schedule.topk),
            **dict(zip(names, (first, second, third))),
        )

    @functools.cached_property
    def _target_step(self) -> Step:
        return functools.partial(
            objective.target_step, setup=self.setup, batch=self.options.batch, length=self.options.length
        )

    @functools.cached_property
    def _baseline_step(self) -> Step:
        return functools.partial(
            objective.baseline_step,
            config=self.baseline_config,
            batch=self.options.batch,
            length=self.options.length,
        )

    # ---- what phases hand on ------------------------------------------------------------------------------------

    def _masters(self, scopes: tuple[str, ...]) -> Masters:
        return initial_masters(self.config, scopes, self.options.seed)

    def _state_of(self, phase: str, like: TrainState) -> TrainState | None:
        if phase in self._ended:
            return self._ended[phase]
        directory = self.options.out / "states" / phase
        if not directory.is_dir():
            return None
        states = States(directory)
        state = states.newest(like)
        states.close()
        return state

    def _carried(self, phase: str, needed: bool = True) -> Masters:
        """Masters that a phase left: its snapshot, which travels.

        Raises:
          FileNotFoundError: the phase did not run.
        """
        masters = load_snapshot(self.options.out / "snapshots", phase)
        if masters is None and needed:
            raise FileNotFoundError(f"{self.options.out}/snapshots holds nothing of phase {phase}: run it first")
        return masters

    def _frozen(self) -> Masters:
        weights = serving_weights(
            self._carried("replay"), self.config, ("text",), self.setup.precision.activation_dtype
        )
        return jax.tree.map(jax.block_until_ready, weights)

    def _draft_weights(self, masters: Masters) -> Masters:
        return serving_weights(masters, self.config, ("draft",), self.setup.precision.activation_dtype)

    @property
    def _prompt(self) -> int:
        """Tokens given before a continuation."""
        return min(PROMPT, self.options.length // 8)

    def _generated(self, stream: Array, count: int, seed: int) -> Array:
        """Greedy continuations of windows of a stream, [count, length / 2]."""
        frozen = self._frozen()
        length = self.options.length // 2
        constants = self.constants

        @jax.jit
        def some(weights: Masters, prompts: Array) -> Array:
            return generate(
                weights, constants.tables, constants.plain, constants.yarn, prompts, length, setup=self.setup
            )

        batch = min(count, 512)
        parts = []
        began = time.perf_counter()
        for number in range(0, count, batch):
            key = jax.random.fold_in(jax.random.PRNGKey(seed), number)
            prompts, _ = objective.sample(stream, key, batch, self._prompt)
            parts.append(np.asarray(some(frozen, prompts)))
        self.log(phase="generate", sequences=count, elapsed=round(time.perf_counter() - began, 1))
        return jnp.asarray(np.concatenate(parts)[:count])

    # ---- held-out text ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _target_nats(self) -> Callable[[Masters, Array], Array]:
        setup = dataclasses.replace(self.setup, index_loss=False)
        constants, config = self.constants, self.config

        @jax.jit
        def nats(masters: Masters, ids: Array) -> Array:
            weights = serving_weights(masters, config, ("text",), setup.precision.activation_dtype)
            output = backbone(
                weights,
                constants.tables,
                constants.plain,
                constants.yarn,
                ids[:, :-1],
                released_narrowing(config),
                whole(ids.shape[0]),
                0,
                setup=setup,
            )
            return objective.cross_entropy(head(weights, output.hidden), ids[:, 1:])

        return nats

    @functools.cached_property
    def _baseline_nats(self) -> Callable[[Masters, Array], Array]:
        table, config = self.baseline_table, self.baseline_config
        return jax.jit(
            lambda masters, ids: objective.cross_entropy(
                baseline_logits(masters, table, ids[:, :-1], config), ids[:, 1:]
            )
        )

    def _held_out(self, phase: str, nats_of: Callable[[Masters, Array], Array]) -> dict[str, float] | None:
        """Measures the masters a phase left; None when it did not run."""
        masters = self._carried(phase, needed=False)
        if masters is None:
            return None
        batch = min(self.options.batch, 16)
        windows = held_out_windows(self.held_out, self.options.length, batch, BEGIN)[: self.options.windows]
        result = bits_per_byte(nats_of, masters, windows, self.byte_lengths, batch)
        self.log(phase=phase, held_out=True, **result)
        return result


class Teacher(NamedTuple):
    """What the draft learns from.

    Attributes:
      constants: of the run.
      frozen: serving weights of the target.
      generated: [n, L] its own greedy text.
    """

    constants: Constants
    frozen: Masters
    generated: Array


def draft_step(
    state: TrainState,
    teacher: Teacher,
    schedule: Schedule,
    *,
    setup: Setup,
    batch: int,
    length: int,
) -> tuple[TrainState, Array]:
    """One step of the draft: half of the sequences are of the corpus, half the target's own.

    Metrics are those of `draft.draft_loss`, over both halves.
    """
    constants, frozen, generated = teacher
    width = setup.config.text.dspark_block_size
    key = jax.random.fold_in(state.key, state.step)
    place, row, where = jax.random.split(key, 3)
    half = max(batch // 2, 1)
    real, _ = objective.sample(constants.stream, place, half, length)
    own = generated[jax.random.randint(row, (batch - half,), 0, generated.shape[0])][:, :length]
    ids = jnp.concatenate([real, own], axis=0)
    anchors = jax.random.randint(where, (ids.shape[0], length // 8), 1, length - width)
    plain = dataclasses.replace(setup, index_loss=False)
    output = backbone(
        frozen,
        constants.tables,
        constants.plain,
        constants.yarn,
        ids,
        Narrowing(schedule.topk, schedule.blocks),
        whole(ids.shape[0]),
        0,
        setup=plain,
    )
    wanted = draft.proposal_targets(head(frozen, output.hidden), anchors, width)
    sequence = jnp.repeat(jnp.arange(ids.shape[0]), anchors.shape[1])
    following = ids[sequence[:, None], anchors.reshape(-1)[:, None] + 1 + jnp.arange(width)]

    def loss(masters: Masters) -> tuple[Array, Array]:
        weights = serving_weights(masters, setup.config, ("draft",), setup.precision.activation_dtype)
        weights = {**weights, "embed.weight": frozen["embed.weight"], "head.weight": frozen["head.weight"]}
        keys = draft.context_keys(weights, output.features, constants.plain, setup=setup)
        blocks = draft.draft(weights, keys, ids, anchors, constants.plain, setup=setup)
        return draft.draft_loss(blocks, wanted, following)

    gradients, metrics = jax.grad(loss, has_aux=True)(state.masters)
    return update(state, gradients, schedule.rate), metrics


@functools.cache
def _several(step: Step, count: int) -> Callable[[TrainState, Any, Schedule], tuple[TrainState, Array]]:
    """`count` steps as one program that gives the mean of their metrics; phases with the same step share it."""

    def several(state: TrainState, constants: Any, schedule: Schedule) -> tuple[TrainState, Array]:
        state, metrics = jax.lax.scan(lambda carry, _: step(carry, constants, schedule), state, None, length=count)
        return state, jnp.mean(metrics, axis=0)

    return jax.jit(several, donate_argnums=0)


def _table(frequencies: np.ndarray, positions: int) -> RopeTable:
    return RopeTable(*(jnp.asarray(part) for part in build_table(frequencies, positions)))


def _schedule(rate: float, topk: int, blocks: int, replay: float) -> Schedule:
    return Schedule(jnp.float32(rate), jnp.int32(topk), jnp.int32(blocks), jnp.float32(replay))
