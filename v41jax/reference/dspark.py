"""The DSpark draft of the reference: target features, context keys, the block forward, picking, greedy verification.

Written from the DSpark specification in float64 for one sequence. A draft stage is a window-only `ReferenceLayer`
whose window says in plain terms what a block sees: the context keys of the last positions, and all of its own keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from checkpoints.load import Checkpoint
from v41jax.config import CandidateRole, LayerMode, LayerTopology
from v41jax.reference.hyper_connections import collapse, identity_pre_mix
from v41jax.reference.layer import ReferenceLayer
from v41jax.reference.model import ReferenceModel
from v41jax.reference.numerics import Arithmetic, Float, rms_norm, rope_frequencies, rope_tables, rotate
from v41jax.reference.records import (
    FROM_FORWARD,
    FROM_STATE,
    HIDDEN,
    ForwardInputs,
    ForwardMemory,
    LayerRecord,
    LayerVisibility,
    SequenceState,
)
from v41jax.reference.weights import Weights


@dataclasses.dataclass(frozen=True)
class DraftRecord:
    """One drafted block; letters as in the DSpark specification, `T` its width.

    Attributes:
      proposals: [T] int32.
      base_logits: [T, V], before the Markov bias.
      logits: [T, V], what the proposals are the maxima of.
      confidence: [T] raw logits of the confidence head.
      hidden: [T, D], the collapse before the norm.
      stages: the record of every stage.
    """

    proposals: NDArray[np.int32]
    base_logits: Float
    logits: Float
    confidence: Float
    hidden: Float
    stages: tuple[LayerRecord, ...]


@dataclasses.dataclass(frozen=True)
class Round:
    """One greedy verification.

    Attributes:
      anchor: newest emitted token before it.
      proposals: [T] int32 drafted.
      targets: [T + 1] int32, the target's choice after the anchor and after each proposal.
      accepted: proposals that agree.
      emitted: `accepted + 1` tokens.
    """

    anchor: int
    proposals: NDArray[np.int32]
    targets: NDArray[np.int32]
    accepted: int
    emitted: tuple[int, ...]


class ReferenceDraft:
    """A float64 NumPy transcription of the draft forward (DSpark specification, sections "Target features" to
    "Confidence head").

    Args of the constructor:
      checkpoint: open, text and draft scopes.
      rounding: "none" or "bfloat16".
      activation_quantization: apply the activation formats.
      keep_weights: hold widened weights.
      probe: see `Arithmetic.probe`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        rounding: str = "none",
        activation_quantization: bool = True,
        keep_weights: bool = True,
        probe: Callable[[str, Float, Callable[[Float], Float]], Float] | None = None,
    ):
        text = checkpoint.config.text
        self.text = dataclasses.replace(
            text, n_routed_experts=text.dspark_n_routed_experts, num_experts_per_tok=text.dspark_num_experts_per_tok
        )
        self.arithmetic = Arithmetic(rounding, activation_quantization, probe=probe)
        self._weights = Weights(checkpoint, keep=keep_weights)
        self._frequencies = rope_frequencies(text, compressed=False)
        config = dataclasses.replace(checkpoint.config, text=self.text)
        self._stages = tuple(
            ReferenceLayer(
                LayerTopology(stage, LayerMode.WINDOW, 0, None, None, CandidateRole.NONE, None),
                config,
                self._weights,
                self.arithmetic,
                name=f"mtp.{stage}",
            )
            for stage in range(text.num_nextn_predict_layers)
        )
        self._last = f"mtp.{len(self._stages) - 1}"

    def features(self, layers: Sequence[LayerRecord]) -> Float:
        """What the draft reads of a target forward, [m, taps * D]."""
        taps = [layers[layer].input_streams.mean(axis=1) for layer in self.text.dspark_target_layer_ids]
        return self.arithmetic.activation(np.concatenate(taps, axis=1))

    def context_keys(self, features: Float, positions: ArrayLike) -> Float:
        """Window rows of every stage, [stages, m, d].

        Args:
          features: [m, taps * D]; positions: [m].
        """
        arithmetic, epsilon = self.arithmetic, self.text.rms_norm_eps
        projected = arithmetic.q8(features, "mtp.0.features") @ self._weights.dense("mtp.0.main_proj").T
        norm = self._weights.plain("mtp.0.main_norm.weight")
        main = rms_norm(arithmetic.activation(projected), norm, epsilon, arithmetic)
        quantized = arithmetic.q8(main, "mtp.main")
        cos, sin = rope_tables(self._frequencies, np.asarray(positions, np.int64))
        keys = []
        for stage in range(len(self._stages)):
            name = f"mtp.{stage}.attn"
            latent = arithmetic.activation(quantized @ self._weights.dense(f"{name}.wkv").T)
            latent = rms_norm(latent, self._weights.plain(f"{name}.kv_norm.weight"), epsilon, arithmetic)
            keys.append(arithmetic.q8(rotate(latent, cos, sin, arithmetic), f"mtp.{stage}.context"))
        return np.stack(keys)

    def first_streams(self, anchor: int) -> tuple[Float, Float]:
        """Streams [T, S, D] and pre-mix [T, S] that enter stage 0."""
        ids = np.full(self.text.dspark_block_size, self.text.dspark_noise_token_id)
        ids[0] = anchor
        rows = self._weights.plain("embed.weight")[ids]
        streams = np.repeat(rows[:, None], self.text.hc_mult, axis=1)
        return streams, identity_pre_mix(ids.size, self.text.hc_mult)

    def run_stage(self, stage: int, streams: Float, pre_mix: Float, position: int, context: Float) -> LayerRecord:
        """One stage on the rows of a block.

        Args:
          stage: number; streams: [T, S, D]; pre_mix: [T, S].
          position: `a`, of the last token the target has processed and committed.
          context: [a + 1, d], this stage's keys by position.
        """
        width = streams.shape[0]
        positions = np.arange(position + 1, position + 1 + width)
        seen = np.arange(position + 1 + width)
        bank = np.where(seen > position, FROM_FORWARD, FROM_STATE)
        window = np.where(seen > position - self.text.sliding_window, bank, HIDDEN).astype(np.int8)
        every = np.ones(width, bool)
        inputs = ForwardInputs(
            start=position + 1,
            positions=positions,
            image_rows=~every,
            embeddings=streams[:, 0],
            engram_row_ids=np.zeros((width, 0, 0), np.int64),
            engram_rows=(),
            dead=every,
        )
        memory = ForwardMemory(SequenceState(position + 1, window={stage: context}))
        visibility = LayerVisibility(every, every, np.tile(window, (width, 1)))
        return self._stages[stage].run(streams, pre_mix, inputs, memory, visibility)

    def draft(self, anchor: int, position: int, context: Float) -> DraftRecord:
        """The greedy proposals that follow `anchor`.

        Args:
          anchor: newest token, at `position + 1`, not processed by the target.
          position: `a`.
          context: [stages, a + 1, d], `context_keys` of every processed position.
        """
        streams, pre_mix = self.first_streams(anchor)
        records = []
        for stage in range(len(self._stages)):
            record = self.run_stage(stage, streams, pre_mix, position, context[stage])
            streams, pre_mix = record.streams, record.pre_mix
            records.append(record)
        hidden = collapse(streams, pre_mix, self.arithmetic)
        norm = self._weights.plain(f"{self._last}.norm.weight")
        normed = rms_norm(hidden, norm, self.text.rms_norm_eps, self.arithmetic)
        base = normed @ self._weights.plain("head.weight").T
        proposals, logits, embeddings = pick(
            anchor,
            base,
            self._weights.plain(f"{self._last}.markov_head.embed.weight"),
            self._weights.plain(f"{self._last}.markov_head.head.weight"),
        )
        projection = self._weights.plain(f"{self._last}.confidence_head.proj.weight")[0]
        confidence = np.concatenate([hidden, embeddings], axis=1) @ projection
        return DraftRecord(proposals, base, logits, confidence, hidden, tuple(records))


def pick(anchor: int, base: Float, embed: Float, head: Float) -> tuple[NDArray[np.int32], Float, Float]:
    """Proposals left to right (DSpark specification, "Picking the five tokens").

    Args:
      anchor: token before the first one; base: [T, V]; embed, head: [V, rank].

    Returns:
      Proposals [T], biased logits [T, V], and the embedding of the token before each, [T, rank].
    """
    previous, proposals, logits, embeddings = anchor, [], [], []
    for row in base:
        embeddings.append(embed[previous])
        logits.append(row + head @ embed[previous])
        previous = int(np.argmax(logits[-1]))
        proposals.append(previous)
    return np.array(proposals, np.int32), np.stack(logits), np.stack(embeddings)


def accepted_count(targets: ArrayLike, proposals: ArrayLike) -> int:
    """Leading proposals that equal the target's choices (DSpark specification, "Verification")."""
    targets, proposals = np.asarray(targets), np.asarray(proposals)
    agree = targets[: proposals.size] == proposals
    return int(np.cumprod(agree).sum())


def speculate(model: ReferenceModel, draft: ReferenceDraft, prompt: ArrayLike, rounds: int) -> list[Round]:
    """Greedy decoding of one prompt by draft and verification.

    The state after a round is that of a forward over the committed rows alone: the rejected ones never reach it.
    """
    output = model.forward(prompt)
    context = draft.context_keys(draft.features(output.layers), np.arange(output.state.length))
    anchor = int(np.argmax(output.logits[-1]))
    state = output.state
    result = []
    for _ in range(rounds):
        position = state.length - 1
        proposals = draft.draft(anchor, position, context).proposals
        rows = np.concatenate([[anchor], proposals])
        targets = np.argmax(model.forward(rows, state=state).logits, axis=1).astype(np.int32)
        accepted = accepted_count(targets, proposals)
        result.append(Round(anchor, proposals, targets, accepted, tuple(targets[: accepted + 1].tolist())))
        output = model.forward(rows[: accepted + 1], state=state)
        fresh = draft.context_keys(draft.features(output.layers), np.arange(position + 1, output.state.length))
        context = np.concatenate([context, fresh], axis=1)
        state, anchor = output.state, int(targets[accepted])
    return result
