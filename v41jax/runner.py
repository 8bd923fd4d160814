"""`ModelRunner`: weights, pools and one compiled step per bucket; the only holder of the pools.

A step is one call: state copies, forward, sampling. Shapes come from the scheduler's buckets, contents from arrays;
nothing that varies between steps is captured in a closure. What to run is the scheduler's decision.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels import backend
from scheduler import pools as pool_arrays
from scheduler.batch import BatchStep, EngramRows
from scheduler.buckets import StepShape
from scheduler.states import StateMaintenanceOps
from v41jax.bounded_replay import take_rows
from v41jax.compiled_steps import CompiledStep, Lowered, compiled, compiler_options
from v41jax.flow import Flow
from v41jax.layers.rows import Phase
from v41jax.layers.vision import write_image_rows
from v41jax.model import ForwardOutput, ModelSetup, forward, head
from v41jax.packed_arguments import StepPacking
from v41jax.page_transfer import ONE_DEVICE, TransferName, Transfers, run_transfer
from v41jax.parameters import Parameters
from v41jax.piecewise import PiecewiseStep
from v41jax.sampling import LogitEdits, SamplingInputs, TokenScores, choose_tokens, token_scores
from v41jax.sharding import join_steps
from v41jax.state_copies import Images, StateCopies, allocate_images
from v41jax.step_arrays import empty_step, engram_shapes, image_shape

Array = jax.Array
Pools = pool_arrays.Pools

_log = logging.getLogger(__name__)

Execution = Literal["FULL", "PIECEWISE", "EAGER"]
"""How a step runs; see `ModelRunner`."""

MOST_COMPILING = 8
"""Programs that are compiled at a time, each on a core of its own."""

SCORED_ROWS = 128
"""Prompt rows whose logits exist at once."""

ProgramKey = tuple[StepShape, bool] | int
"""Names a program: a step's shape and whether its rows take image embeddings, or the requests of a draft call."""


class StepOutput(NamedTuple):
    """What a step leaves on the device besides the pools.

    Attributes:
      tokens: [F] int32 sampled ids; padding entries hold some id. Of a verification [R, S + 1], the ids each request
        emits, then -1.
      logits: [F, V] float32, the model's own.
      cursor_mismatch: [R] bool, a continuing request whose slot did not stand where the forward started.
      scores: [F] `TokenScores` of the chosen tokens, all zero unless the step was asked for them.
      prompt_scores: `TokenScores` of the step's targets, [N]; zero for rows without one. None without targets.
    """

    tokens: Array
    logits: Array
    cursor_mismatch: Array
    scores: TokenScores
    prompt_scores: TokenScores | None


class StepSampling(NamedTuple):
    """How the tokens of a step are chosen.

    Attributes:
      inputs: per output row; of a verification per request, positions those of the token its first row chooses.
      edits: per output row.
      scored: scalar bool, log-probabilities are wanted.
      targets: [N] int32, the token that follows a row of a prompt whose log-probability is wanted; the vocabulary size
        or more wants none. None when the engine never scores prompts, or in a decode step.
    """

    inputs: SamplingInputs
    edits: LogitEdits
    scored: Array
    targets: Array | None = None


class StateMismatchError(RuntimeError):
    """A slot's cursor disagrees with the scheduler: its state must be rebuilt from a recoverable boundary."""


def serve_step(
    params: Parameters,
    pools: Pools,
    adjustments: Array,
    batch: BatchStep,
    engram_rows: EngramRows,
    sampling: StepSampling,
    image_embeddings: Array | None = None,
    *,
    setup: ModelSetup,
    phase: str,
) -> tuple[Pools, Array, StepOutput]:
    """Forward, sampling, and the new tokens' place on the device; pure. The image placeholder is never chosen.

    Args:
      params: weights.
      pools: request memory, donated.
      adjustments: [slots, V] float32, donated; see `edit_logits`.
      batch: the step.
      engram_rows: table rows of the batch.
      sampling: how tokens are chosen.
      image_embeddings: [N, D], read where `batch.image_rows`, or None.
      setup: static.
      phase: static, "prefill" or "decode".
    """
    pools, output = forward(
        params,
        pools,
        batch,
        engram_rows,
        setup=setup,
        phase=phase,
        image_embeddings=image_embeddings,
        keep_flow=sampling.targets is not None,
    )
    return finish_step(params, pools, adjustments, batch, output, sampling, setup=setup)


def finish_step(
    params: Parameters,
    pools: Pools,
    adjustments: Array,
    batch: BatchStep,
    output: ForwardOutput,
    sampling: StepSampling,
    *,
    setup: ModelSetup,
) -> tuple[Pools, Array, StepOutput]:
    """What a step does after its forward; arguments and results as of `serve_step`."""
    adjustments, tokens, scores = choose_tokens(
        output.logits,
        adjustments,
        sampling.edits,
        sampling.inputs,
        sampling.scored,
        never=setup.config.image_token_id,
    )
    prompt_scores = None
    if sampling.targets is not None:
        prompt_scores = score_rows(params, output.flow, sampling.targets, setup)
    rows = batch.positions.shape[0]
    slots = pools.last_token.shape[0]
    real = batch.output_rows < rows
    request = batch.batch_ids[jnp.minimum(batch.output_rows, rows - 1)]
    target = jnp.where(real, batch.slots[jnp.maximum(request, 0)], slots)
    pools = pools.replace(last_token=pools.last_token.at[target].set(tokens, mode="drop"))
    return pools, adjustments, StepOutput(tokens, output.logits, output.cursor_mismatch, scores, prompt_scores)


def score_rows(params: Parameters, flow: Flow, targets: Array, setup: ModelSetup) -> TokenScores:
    """Log-probabilities at rows of a forward, a block at a time: all logits of a long prompt would not fit.

    Args:
      params: weights.
      flow: of the last layer, N rows.
      targets: [N] int32; see `StepSampling`.
      setup: static.

    Returns:
      [N] scores; of a block without a target all zero.
    """
    count, vocabulary = targets.shape[0], setup.config.text.vocab_size
    size = math.gcd(count, SCORED_ROWS)
    rows = jnp.arange(count, dtype=jnp.int32).reshape(-1, size)

    def block(part: tuple[Array, Array]) -> TokenScores:
        indices, wanted = part
        present = jnp.any(wanted < vocabulary)
        logits = jax.lax.cond(
            present,
            lambda: head(params, take_rows(flow, indices), setup.config),
            lambda: jnp.zeros((size, vocabulary), jnp.float32),
        )
        return token_scores(logits, jnp.minimum(wanted, vocabulary - 1), present)

    scores = jax.lax.map(block, (rows, targets.reshape(-1, size)))
    return jax.tree.map(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), scores)


@functools.partial(jax.jit, static_argnames=("count", "dtype"))
def _spread(rows: Array, destinations: Array, *, count: int, dtype: DTypeLike) -> Array:
    """[N, D] with the given rows at their places. Apart from the step, whose programs then have two variants and not
    one for every number of image rows."""
    return write_image_rows(jnp.zeros((count, rows.shape[1]), dtype), rows, destinations)


@functools.partial(jax.jit, donate_argnums=0)
def _with_row(adjustments: Array, slot: Array, row: Array) -> Array:
    return adjustments.at[slot].set(row)


class ModelRunner:
    """Runs scheduled steps on the device.

    Attributes:
      setup: what the forward is specialized on.
      params: weights.
      num_pages: PAGE units of the pools, of all data shards.
      num_slots: state slots, of all data shards.
      recompiles: programs compiled after `warm_up` declared the set complete.
      scores_prompts: prefill programs can report log-probabilities of prompt tokens.
      failed: a step or draft call failed and took the pools with it; the runner cannot be used again.
    """

    def __init__(
        self,
        params: Parameters,
        setup: ModelSetup,
        *,
        num_pages: int,
        num_slots: int,
        num_images: int = 0,
        execution: Execution = "FULL",
        scores_prompts: bool = False,
    ):
        """Allocates the pools.

        Args:
          params: weights.
          setup: what the forward is specialized on.
          num_pages: PAGE units of all data shards.
          num_slots: state slots of all data shards.
          num_images: checkpoint images that can be held at once (copy transfer), of all data shards.
          execution: "FULL" compiles whole steps, ahead. "PIECEWISE" compiles parts of a step at their first use, see
            `piecewise`; "EAGER" runs op by op, the correctness baseline.
          scores_prompts: prefill programs can report log-probabilities of prompt tokens.
        """
        self.params = params
        self.setup = setup
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.recompiles = 0
        self.scores_prompts = scores_prompts
        self._execution = execution
        self._pieces: dict[str, PiecewiseStep] = {}
        self._images: Images
        self._pools, self._images, self._adjustments = self._allocate(num_images)
        self._copies = self._make_copies()
        self._empty_edits: dict[int, LogitEdits] = {}
        self._compiled: dict[ProgramKey, CompiledStep] = {}
        self._operations: backend.Choices = {}
        self._warm = False
        self.failed = False

    def _allocate(self, num_images: int) -> tuple[Pools, Images, Array]:
        """Pools, checkpoint images and logit adjustments of the runner's size."""
        pools = pool_arrays.allocate(self.setup.geometry, self.num_pages, self.num_slots)
        adjustments = jnp.zeros((self.num_slots, self.setup.config.text.vocab_size), jnp.float32)
        return pools, allocate_images(self.setup.geometry, pools, num_images), adjustments

    def _make_copies(self) -> StateCopies:
        """What moves slots and images of these arrays."""
        return StateCopies()

    def _lowered_step(self, shape: StepShape, arguments: Sequence[Any]) -> Lowered:
        """The whole step, lowered for these (abstract) arguments."""
        packing = StepPacking(arguments)
        step = self.step_function(shape)

        def packed_step(*packed: Any) -> tuple[Pools, Array, StepOutput]:
            return step(*packing.unpack(*packed))

        lowered = jax.jit(packed_step, donate_argnums=(1, 2)).lower(*packing.abstract)
        return Lowered(lowered, packing.pack, compiler_options(self.setup.parallel))

    @property
    def pools(self) -> Pools:
        """The live pools, for tests and debugging: read them before the next step or draft call donates them."""
        return self._pools

    def replace_pools(self, pools: Pools) -> None:
        """Puts other contents in place (tests poison memory with it)."""
        self._pools = pools

    @property
    def images(self) -> Images:
        """The live STATE images; as `pools`."""
        return self._images

    def replace_images(self, images: Images) -> None:
        """Puts other contents in place."""
        self._images = images

    @property
    def transfers(self) -> Transfers:
        """What reads and writes pages and images as bytes."""
        return ONE_DEVICE

    def transfer(self, name: TransferName, *arguments: Any) -> Any:
        """See `run_transfer`."""
        return run_transfer(self, name, *arguments)

    # Compilation ---------------------------------------------------------------------------------------------

    def warm_up(self, shapes: Iterable[StepShape], *, images: bool = False, drafts: Iterable[int] = ()) -> None:
        """Compiles programs ahead from abstract shapes; no pool byte is touched. Only whole steps are compiled ahead.

        Args:
          shapes: every shape that the scheduler's buckets can produce.
          images: also compile the variants whose rows take image embeddings.
          drafts: batch sizes of draft calls, of one data shard; for a runner that drafts.
        """
        if self._execution != "FULL":
            return
        keys: list[ProgramKey] = list(drafts)
        for shape in shapes:
            keys += [(shape, False), (shape, True)] if images and shape.phase.value == "prefill" else [(shape, False)]
        # Tracing holds the interpreter, compiling does not.
        with ThreadPoolExecutor(min(MOST_COMPILING, os.cpu_count() or 1)) as pool:
            wanted = dict.fromkeys(key for key in keys if key not in self._compiled)
            for key, program in [(key, pool.submit(compiled, self._lower(key))) for key in wanted]:
                self._compiled[key] = program.result()
        self.load_adjustments(0, np.zeros(self._adjustments.shape[1], np.float32))
        self._warm = True

    def _program(self, key: ProgramKey) -> CompiledStep:
        if key not in self._compiled:
            self._compiled[key] = compiled(self._lower(key))
        return self._compiled[key]

    def _lower(self, key: ProgramKey) -> Lowered:
        """A program, traced for abstract arguments."""
        assert not isinstance(key, int), "only a DraftRunner drafts"
        shape, images = key
        self.note_compilation(shape)
        setup = self.setup
        shards = setup.parallel.data
        inputs = sampling_inputs([], shards * sampled_rows(shape))
        sampling = self.step_sampling(inputs, outputs=shards * shape.outputs, targets=self.no_targets(shape))
        arguments = [
            abstract(self.weights),
            abstract(self._pools),
            abstract(self._adjustments),
            abstract(join_steps([empty_step(shape, setup.geometry)] * shards)),
            engram_shapes(setup.config, shards * shape.rows),
            abstract(sampling),
        ]
        if images:
            arguments.append(image_shape(setup.config, shards * shape.rows, setup.precision.activation_dtype))
        with backend.recording(self._operations):
            return self._lowered_step(shape, arguments)

    def note_compilation(self, what: object) -> None:
        """Counts a compilation that warm-up should have done."""
        if self._warm:
            self.recompiles += 1
            _log.warning("compiling %s after warm-up: the bucket ladders do not cover it", what)

    @property
    def weights(self) -> Any:
        """What step functions take as their first argument."""
        return self.params

    def step_function(self, shape: StepShape) -> Callable[..., tuple[Pools, Array, StepOutput]]:
        """The pure function of a step of this shape; arguments as of `serve_step`, without the static ones."""
        return functools.partial(serve_step, setup=self.setup, phase=shape.phase.value)

    # Execution -----------------------------------------------------------------------------------------------

    def execute(
        self,
        shape: StepShape,
        batch: BatchStep,
        engram_rows: EngramRows,
        sampling: StepSampling,
        ops: StateMaintenanceOps | None = None,
        image_rows: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> StepOutput:
        """Dispatches one step; returns before it has run.

        Args:
          shape: of the program, of one data shard.
          batch: the step's arrays, of all data shards.
          engram_rows: table rows of the batch.
          sampling: made by `step_sampling`.
          ops: state operations to run before.
          image_rows: embeddings [I, D] of every image row of the batch and their rows [I] int32, padding N; see
            `write_image_rows`. None when no row lies in an image, which runs the program of text.

        Raises:
          RuntimeError: after an earlier step or draft call failed; the pools were donated to it and are gone.
          Exception: whatever the step refuses or fails of. Up to the first call that the pools, images or adjustments
            are donated to everything is as it was, and the next step can run.
        """
        images = image_rows is not None
        arguments: list[Any] = [batch, engram_rows, sampling]
        if image_rows is not None:
            count = self.setup.parallel.data * shape.rows
            arguments.append(_spread(*image_rows, count=count, dtype=self.setup.precision.activation_dtype))
        program: Callable[..., tuple[Pools, Array, StepOutput]]
        if self._execution == "FULL":
            compiled_step = self._program((shape, images))
            program, arguments = compiled_step.call, list(compiled_step.prepare(*arguments))
        elif self._execution == "PIECEWISE":
            program = self._in_pieces(shape.phase.value)
        else:
            program = self.step_function(shape)
            arguments = jax.tree.map(jnp.asarray, arguments)
        with self._taking_pools(), backend.recording(self._operations):
            if ops is not None:
                self._maintain(ops)
            self._pools, self._adjustments, output = program(self.weights, self._pools, self._adjustments, *arguments)
        return output

    @contextlib.contextmanager
    def _taking_pools(self) -> Iterator[None]:
        """Around calls that the pools are donated to: if they were taken when one of these fails, they are gone.

        JAX checks the arguments of a call before it takes those that are donated.
        """
        if self.failed:
            raise RuntimeError("an earlier step failed and took the pools with it: build a new engine")
        held = jax.tree.leaves((self._pools, self._images, self._adjustments))
        try:
            yield
        except BaseException:
            self.failed = any(leaf.is_deleted() for leaf in held)
            raise

    def _in_pieces(self, phase: Phase) -> PiecewiseStep:
        if phase not in self._pieces:
            self._pieces[phase] = PiecewiseStep(self.setup, phase, finish_step)
        return self._pieces[phase]

    def load_adjustments(self, slot: int, row: np.ndarray) -> None:
        """Replaces what a slot's logits are adjusted by: row [V] float32."""
        with self._taking_pools():
            self._adjustments = self._put_row(self._adjustments, np.int32(slot), row)

    @property
    def _put_row(self) -> Callable[[Array, np.int32, np.ndarray], Array]:
        """Adjustments, a slot and its row -> adjustments with that row, in place."""
        return _with_row

    def step_sampling(
        self,
        inputs: SamplingInputs,
        edits: LogitEdits | None = None,
        *,
        outputs: int | None = None,
        scored: bool = False,
        targets: np.ndarray | None = None,
    ) -> StepSampling:
        """Sampling of a step; without edits the arrays that change nothing, which are already on the device.

        `outputs` is the number of output rows where it is not that of `inputs`.
        """
        outputs = len(inputs.seeds) if outputs is None else outputs
        return StepSampling(inputs, self._no_edits(outputs) if edits is None else edits, np.bool_(scored), targets)

    def no_targets(self, shape: StepShape) -> np.ndarray | None:
        """Targets of a step in which no prompt is scored, to be filled in; None where the program has none."""
        if not self.scores_prompts or shape.phase.value != "prefill":
            return None
        return np.full(self.setup.parallel.data * shape.rows, self.setup.config.text.vocab_size, np.int32)

    def _no_edits(self, outputs: int) -> LogitEdits:
        if outputs not in self._empty_edits:
            slots, vocabulary = self._adjustments.shape
            self._empty_edits[outputs] = jax.tree.map(jnp.asarray, empty_edits(outputs, slots, vocabulary))
        return self._empty_edits[outputs]

    def _maintain(self, ops: StateMaintenanceOps) -> None:
        """Relocations, then stores, then restores (runtime specification, "Operations per batch, in this order")."""
        identity = self.setup.geometry.layout_id
        for image in (*ops.stores, *ops.restores):
            if image.layout_id != identity or image.image_bytes != self.setup.geometry.image_bytes:
                raise ValueError(f"an image of layout {image.layout_id!r} does not fit pools of layout {identity!r}")
        self._pools = self._copies.relocate(self._pools, [(move.source, move.destination) for move in ops.relocations])
        if ops.stores:
            pairs = [(store.slot, store.image) for store in ops.stores]
            self._images = self._copies.store(self._images, self._pools, pairs)
        if ops.restores:
            pairs = [(restore.image, restore.slot) for restore in ops.restores]
            self._pools = self._copies.restore(self._pools, self._images, pairs)

    # Reports -------------------------------------------------------------------------------------------------

    @property
    def programs(self) -> Sequence[CompiledStep]:
        """Everything compiled ahead."""
        return list(self._compiled.values())

    def summary(self) -> dict[str, Any]:
        """Buckets, compile times and memory: what an operator reads after start-up.

        `operations` says which implementation each operation uses in the programs that exist, and why.
        """
        device = jax.devices()[0]
        return {
            "device": device.device_kind,
            "platform": device.platform,
            "jax": jax.__version__,
            "weight_bytes": _bytes(self.weights),
            "pool_bytes": _bytes(self._pools),
            "image_bytes": _bytes(self._images),
            "pages": self.num_pages,
            "slots": self.num_slots,
            "temporary_bytes": max((step.temporary_bytes for step in self.programs), default=0),
            "programs": len(self.programs),
            "compile_seconds": round(sum(step.seconds for step in self.programs), 3),
            "recompiles_after_warm_up": self.recompiles,
            "kernels": self.setup.kernels,
            "operations": {name: list(choices) for name, choices in sorted(self._operations.items())},
            "execution": self._execution,
        }


class SamplingRow(NamedTuple):
    """Parameters of one output row; the fields of `SamplingInputs`, one entry each."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


def empty_edits(outputs: int, slots: int, vocabulary: int) -> LogitEdits:
    """Edits of a step in which no row has any; rows of it may be filled in."""
    return LogitEdits(
        slots=np.full(outputs, slots, np.int32),
        tokens=np.full(outputs, vocabulary, np.int32),
        changes=np.zeros(outputs, np.float32),
        constrained=np.zeros(outputs, bool),
        allowed=np.full((outputs, -(-vocabulary // 32)), 0xFFFFFFFF, np.uint32),
    )


def sampling_inputs(rows: Sequence[SamplingRow], outputs: int, places: Iterable[int] | None = None) -> SamplingInputs:
    """Pads per-request parameters to the output bucket; padding rows are greedy.

    Args:
      rows: one per output row.
      outputs: `F`.
      places: of the rows among the outputs; None puts them first.
    """
    inputs = SamplingInputs(
        temperature=np.zeros(outputs, np.float32),
        top_k=np.zeros(outputs, np.int32),
        top_p=np.ones(outputs, np.float32),
        min_p=np.zeros(outputs, np.float32),
        seeds=np.zeros(outputs, np.uint32),
        positions=np.zeros(outputs, np.int32),
    )
    for index, row in zip(itertools.count() if places is None else places, rows, strict=False):
        inputs.temperature[index] = row.temperature
        inputs.top_k[index] = row.top_k
        inputs.top_p[index] = row.top_p
        inputs.min_p[index] = row.min_p
        inputs.seeds[index] = row.seed
        inputs.positions[index] = row.position
    return inputs


def sampled_rows(shape: StepShape) -> int:
    """Entries of a step's `SamplingInputs`: its output rows, or the requests of a verification."""
    return shape.requests if shape.verifies else shape.outputs


def abstract(tree: Any) -> Any:
    """Shapes and dtypes of arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype), tree)


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
