"""What a reference run reads and leaves behind: sequence state, explicit visibility, and the recorded intermediates.

Letters: `m` rows of the forward, `n` positions known after it, `S` streams, `D` hidden, `d` head dim, `I` index dim,
`E_r = n // ratio` compressed entries, `K` index top-k, `Nb` candidate blocks.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from v41jax.reference.numerics import Float

HIDDEN, FROM_STATE, FROM_FORWARD = 0, 1, 2
"""Values of `LayerVisibility.window`: position not seen, row taken from the state, row computed in this forward."""


@dataclasses.dataclass(frozen=True)
class LayerVisibility:
    """Which rows one layer runs and what each sees; the normal forward is `LayerVisibility.causal`.

    A layer compresses every row that reaches it. Rows that are not in `query_rows` end there: their streams are NaN
    afterwards.

    Attributes:
      query_rows: [m] bool, rows that select, attend and go through the FFN.
      window_rows: [m] bool, rows whose window KV is computed; a superset of what `window` reads FROM_FORWARD.
      window: [m, n] int8 of HIDDEN, FROM_STATE, FROM_FORWARD: the window part of every query.
      write_from: compressed groups ending at a position below it keep the state's entry.
      keep_below: window rows and compressor projections of positions below it keep the state's values.
    """

    query_rows: NDArray[np.bool_]
    window_rows: NDArray[np.bool_]
    window: NDArray[np.int8]
    write_from: int = 0
    keep_below: int = 0

    @classmethod
    def causal(cls, start: int, stop: int, window: int) -> LayerVisibility:
        """Every row of [start, stop) runs and sees the last `window` positions up to itself."""
        rows = np.arange(start, stop)[:, None]
        positions = np.arange(stop)[None, :]
        seen = (positions <= rows) & (positions > rows - window)
        bank = np.where(positions < start, FROM_STATE, FROM_FORWARD).astype(np.int8)
        every = np.ones(stop - start, bool)
        return cls(every, every, np.where(seen, bank, np.int8(HIDDEN)))


@dataclasses.dataclass
class SequenceState:
    """Everything a later forward of the same sequence needs; grows with it.

    Attributes:
      length: positions processed.
      compressed_ids: [n] int32 Engram ids (DEAD at image rows).
      window: layer -> [n, d], NaN where never computed.
      compressed: owner -> [E_r, d], rotated and quantized.
      index_keys: owner -> [E_r, I], rotated and quantized.
      projections: ratio-2 owner -> (values, gates), each [n, d].
    """

    length: int = 0
    compressed_ids: NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    window: dict[int, Float] = dataclasses.field(default_factory=dict)
    compressed: dict[int, Float] = dataclasses.field(default_factory=dict)
    index_keys: dict[int, Float] = dataclasses.field(default_factory=dict)
    projections: dict[int, tuple[Float, Float]] = dataclasses.field(default_factory=dict)

    def copy(self) -> SequenceState:
        """A state that shares the arrays; forwards replace arrays and never write into them."""
        return SequenceState(
            self.length,
            self.compressed_ids,
            dict(self.window),
            dict(self.compressed),
            dict(self.index_keys),
            dict(self.projections),
        )


@dataclasses.dataclass(frozen=True)
class ForwardInputs:
    """The rows of one forward, as every layer sees them.

    Attributes:
      start: position of the first row.
      positions: [m] int64.
      image_rows: [m] bool.
      embeddings: [m, D].
      engram_row_ids: [m, Engram layers, columns] int64.
      engram_rows: per Engram layer [m, columns * head_dim], dequantized; zero at DEAD rows.
      dead: [m] bool, rows whose Engram gate is zero.
    """

    start: int
    positions: NDArray[np.int64]
    image_rows: NDArray[np.bool_]
    embeddings: Float
    engram_row_ids: NDArray[np.int64]
    engram_rows: tuple[Float, ...]
    dead: NDArray[np.bool_]


@dataclasses.dataclass
class ForwardMemory:
    """What layers of one forward hand to later layers besides the streams.

    Attributes:
      state: the sequence state, extended layer by layer.
      selections: index source -> [m, K] int32 entries, ascending, -1 padded.
      candidates: candidate source -> [m, Nb] int32 block ids, ascending, -1 padded.
    """

    state: SequenceState
    selections: dict[int, NDArray[np.int32]] = dataclasses.field(default_factory=dict)
    candidates: dict[int, NDArray[np.int32]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class LayerRecord:
    """Intermediates of one layer; None where the layer has no such thing, NaN (or -1) at rows it did not run.

    Attributes:
      layer: layer number.
      input_streams: [m, S, D] as they enter, before an Engram update.
      input_pre_mix: [m, S].
      mixed_streams: [m, S, D] after the Engram update (the input itself without one).
      streams: [m, S, D] after the layer.
      pre_mix: [m, S] handed to the next layer.
      attention_pre_mix: [m, S] from the attention sublayer, used by the FFN.
      attention_input, attention_output: [m, D], after the norm and after `wo_b`.
      attention_streams: [m, S, D] between the sublayers.
      ffn_input, ffn_output: [m, D].
      window_rows: [m, d] window KV of the forward's rows.
      compressed, index_keys: owner's whole memory after the layer, [E_r, d] and [E_r, I].
      index_query: [m, Hi, I] quantized, at index sources.
      index_head_weights: [m, Hi].
      index_scores: [m, E_r], -inf where invisible or outside the candidates.
      topk: [m, K] int32 used by this layer (its source's list), ascending, -1 padded.
      candidate_blocks: [m, Nb] int32, at the candidate source.
      router_scores: [m, E] unbiased.
      router_choices: [m, k] int32, ascending expert id.
      router_weights: [m, k].
      engram_row_ids: [m, columns] int64; engram_rows: [m, columns * head_dim]; engram_gates: [m, S].
      query: [m, H, d] rotated.
      attended: [m, H, d] after the inverse rotation.
      attention_post, ffn_post: [m, S]; attention_combination, ffn_combination: [m, S, S] (source, destination).
      router_logits: [m, E].
      routed_output, shared_output: [m, D], the two parts of `ffn_output` before its rounding.
    """

    layer: int
    input_streams: Float
    input_pre_mix: Float
    mixed_streams: Float
    streams: Float
    pre_mix: Float
    attention_pre_mix: Float
    attention_input: Float
    attention_output: Float
    attention_streams: Float
    ffn_input: Float
    ffn_output: Float
    window_rows: Float
    router_scores: Float
    router_choices: NDArray[np.int32]
    router_weights: Float
    compressed: Float | None = None
    index_keys: Float | None = None
    index_query: Float | None = None
    index_head_weights: Float | None = None
    index_scores: Float | None = None
    topk: NDArray[np.int32] | None = None
    candidate_blocks: NDArray[np.int32] | None = None
    engram_row_ids: NDArray[np.int64] | None = None
    engram_rows: Float | None = None
    engram_gates: Float | None = None
    query: Float | None = None
    attended: Float | None = None
    attention_post: Float | None = None
    attention_combination: Float | None = None
    ffn_post: Float | None = None
    ffn_combination: Float | None = None
    router_logits: Float | None = None
    routed_output: Float | None = None
    shared_output: Float | None = None


@dataclasses.dataclass(frozen=True)
class ReferenceOutput:
    """Result of a forward.

    Attributes:
      logits: [m, V]; NaN at rows that did not reach the head.
      hidden: [m, D], the normed collapse the head reads.
      layers: one `LayerRecord` a layer, empty when not recorded.
      state: the sequence after the forward.
    """

    logits: Float
    hidden: Float
    layers: tuple[LayerRecord, ...]
    state: SequenceState


def extended(old: NDArray | None, rows: int, width: int) -> Float:
    """A fresh [rows, width] array that begins with the rows of `old` and is NaN after them."""
    result = np.full((rows, width), np.nan)
    if old is not None:
        kept = min(rows, old.shape[0])
        result[:kept] = old[:kept]
    return result
