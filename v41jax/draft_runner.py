"""`DraftRunner`: a `ModelRunner` whose decode steps verify proposals, and which drafts the next ones.

One compiled call verifies and commits, one drafts. Which proposals a step verifies is the scheduler's decision, when to
draft is the engine's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import backend
from scheduler.batch import BatchStep, EngramRows
from scheduler.buckets import StepShape
from scheduler.pools import Pools
from v41jax.compiled_steps import Lowered, compiler_options
from v41jax.draft_parameters import DraftParameters
from v41jax.dspark import DraftBlock, check_draft
from v41jax.model import ModelSetup
from v41jax.packed_arguments import Packing
from v41jax.parameters import Parameters
from v41jax.runner import (
    ModelRunner,
    ProgramKey,
    StepOutput,
    StepSampling,
    abstract,
    finish_step,
    sampling_inputs,
)
from v41jax.sampling import SamplingInputs
from v41jax.speculative_steps import VerifyOutput, context_step, draft_step, verify_step

Array = jax.Array


class DraftingWeights(NamedTuple):
    """Weights of a target and its draft."""

    target: Parameters
    draft: DraftParameters


def serve_prefill(
    weights: DraftingWeights,
    pools: Pools,
    adjustments: Array,
    batch: BatchStep,
    engram_rows: EngramRows,
    sampling: StepSampling,
    image_embeddings: Array | None = None,
    *,
    setup: ModelSetup,
) -> tuple[Pools, Array, StepOutput]:
    """`runner.serve_step` of a prefill that leaves the draft its context."""
    pools, output = context_step(
        weights.target,
        weights.draft,
        pools,
        batch,
        engram_rows,
        setup=setup,
        image_embeddings=image_embeddings,
        keep_flow=sampling.targets is not None,
    )
    return finish_step(weights.target, pools, adjustments, batch, output, sampling, setup=setup)


def serve_verify(
    weights: DraftingWeights,
    pools: Pools,
    adjustments: Array,
    batch: BatchStep,
    engram_rows: EngramRows,
    sampling: StepSampling,
    *,
    setup: ModelSetup,
) -> tuple[Pools, Array, StepOutput]:
    """`runner.serve_step` of a decode step with proposals: `verify_step`."""
    pools, adjustments, output = verify_step(
        *weights, pools, adjustments, batch, engram_rows, sampling.inputs, sampling.edits, sampling.scored, setup=setup
    )
    return pools, adjustments, verified_output(output)


def verified_output(output: VerifyOutput) -> StepOutput:
    """What a runner returns of a verification."""
    return StepOutput(output.verified.tokens, output.logits, output.cursor_mismatch, output.scores, None)


def serve_draft(
    weights: DraftingWeights,
    pools: Pools,
    slots: Array,
    live: Array,
    sampling: SamplingInputs,
    *,
    setup: ModelSetup,
    confidence: bool,
) -> tuple[Pools, DraftBlock]:
    """`draft_step` with the weights of a runner. It takes the pools and hands them back as they were: the next step
    donates them, and the host would wait on the device for a call that still reads what is donated."""
    return pools, draft_step(*weights, pools, slots, live, sampling, setup=setup, confidence=confidence)


class DraftRunner(ModelRunner):
    """Runs prefill, verify and draft calls.

    Attributes:
      draft_parameters: weights of the draft.
      confidence: draft calls report confidences.
    """

    def __init__(
        self,
        params: Parameters,
        setup: ModelSetup,
        draft_parameters: DraftParameters,
        *,
        confidence: bool = False,
        **options: Any,
    ):
        """Allocates the pools.

        Args:
          params: weights of the target.
          setup: what the forward is specialized on; its pools have draft windows.
          draft_parameters: weights of the draft.
          confidence: draft calls report confidences, for dynamic verification lengths.
          options: of `ModelRunner`.

        Raises:
          ValueError: a model or pools that drafting cannot work with; see `check_draft`.
        """
        check_draft(setup)
        super().__init__(params, setup, **options)
        self.draft_parameters = draft_parameters
        self.confidence = confidence

    @property
    def weights(self) -> DraftingWeights:
        """Of target and draft."""
        return DraftingWeights(self.params, self.draft_parameters)

    def step_function(self, shape: StepShape) -> Callable[..., tuple[Pools, Array, StepOutput]]:
        """See `ModelRunner.step_function`."""
        return functools.partial(serve_verify if shape.verifies else serve_prefill, setup=self.setup)

    def summary(self) -> dict[str, Any]:
        """See `ModelRunner.summary`."""
        draft_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.draft_parameters))
        return {**super().summary(), "draft_weight_bytes": draft_bytes, "confidence": self.confidence}

    def draft(
        self, requests: int, slots: Sequence[int], sampling: SamplingInputs, places: Sequence[int] | None = None
    ) -> DraftBlock:
        """Dispatches one draft call for slots whose newest token is in the pools.

        Args:
          requests: batch size of the program, of one data shard.
          slots: of the requests, no more than that; they count inside the shard of the request.
          sampling: [requests of all shards] per request; greedy ones get the likeliest proposals, others are drawn with
            the noise that their verification will use.
          places: of the requests in the program's batch, shard after shard; None puts them first.

        Returns:
          Proposals by place in the program's batch.

        Raises:
          RuntimeError: as of `execute`.
        """
        where = np.arange(len(slots)) if places is None else np.asarray(places)
        padded = np.zeros(requests * self.setup.parallel.data, np.int32)
        padded[where] = slots
        live = np.zeros(padded.shape, bool)
        live[where] = True
        arguments: tuple[Any, ...] = (padded, live, sampling)
        program: Callable[..., tuple[Pools, DraftBlock]]
        if self._execution == "FULL":
            compiled_draft = self._program(requests)
            program, arguments = compiled_draft.call, tuple(compiled_draft.prepare(*arguments))
        else:
            program = self._draft_function()
            arguments = jax.tree.map(jnp.asarray, arguments)
        with self._taking_pools():
            self._pools, block = program(self.weights, self._pools, *arguments)
        return block

    def _draft_function(self) -> Callable[..., tuple[Pools, DraftBlock]]:
        """The pure function of a draft call; arguments as of `serve_draft`, without the static ones."""
        return functools.partial(serve_draft, setup=self.setup, confidence=self.confidence)

    def _lower(self, key: ProgramKey) -> Lowered:
        """See `ModelRunner._lower`."""
        if not isinstance(key, int):
            return super()._lower(key)
        self.note_compilation(f"a draft for {key} requests")
        count = key * self.setup.parallel.data
        rows = jax.ShapeDtypeStruct((count,), np.int32), jax.ShapeDtypeStruct((count,), np.bool_)
        arguments = (abstract(self.weights), abstract(self._pools), *rows, abstract(sampling_inputs([], count)))
        with backend.recording(self._operations):
            return self._lowered_draft(arguments)

    def _lowered_draft(self, arguments: Sequence[Any]) -> Lowered:
        """The draft call, lowered for these (abstract) arguments."""
        weights, pools, *small = arguments
        packing, draft = Packing(small), self._draft_function()

        def packed_draft(weights: DraftingWeights, pools: Pools, words: Array) -> tuple[Pools, DraftBlock]:
            return draft(weights, pools, *packing.unpack(words))

        words = jax.ShapeDtypeStruct((packing.words,), jnp.int32)
        lowered = jax.jit(packed_draft, donate_argnums=1).lower(weights, pools, words)
        return Lowered(lowered, lambda *small: [packing.pack(list(small))], compiler_options(self.setup.parallel))
