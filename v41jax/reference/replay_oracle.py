"""Exact results of bounded-replay forwards: which rows run which layer and what each of them sees, written out densely.

The row sets are transcribed from the runtime specification, sections "Row sets (normative)", "Windows in the decoder",
"Layer 39", "Back-off (short final forward)" and "Quantities of that forward"; nothing is shared with the code that
plans or runs such forwards. A forward of one request at a time; which requests share a batch does not matter.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import ArrayLike, NDArray

from v41jax.reference.model import ReferenceModel
from v41jax.reference.records import FROM_FORWARD, FROM_STATE, HIDDEN, LayerVisibility, ReferenceOutput, SequenceState


@dataclasses.dataclass(frozen=True)
class ReplayForward:
    """One forward of one request.

    Attributes:
      start: position of the first row.
      resume: positions below it have valid compressed entries; rows below it are recomputed. At least `start`.
      end: one past the last row.
      is_final: the forward ends at the prefill's end.
      rebuild: the slot is fresh and the rows below `resume` restore its windows; otherwise rows below `resume` are a
        back-off on a warm slot.
      decoder_replay: the decoder runs on a tail; off for decode steps and where the switch is off.
    """

    start: int
    resume: int
    end: int
    is_final: bool = True
    rebuild: bool = False
    decoder_replay: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.resume < self.end:
            raise ValueError(f"a forward of [{self.start}, {self.end}) that resumes at {self.resume} is none")

    def tail_start(self, window: int) -> int:
        """`s`, the first position that runs the decoder; `end` when the decoder is not run."""
        if not self.decoder_replay:
            return self.start
        return self.end - min(window, self.end - self.start) if self.is_final else self.end


def layer_visibility(forward: ReplayForward, layer: int, *, boundary: int, layers: int, window: int) -> LayerVisibility:
    """Rows and windows of one layer of a forward.

    Args:
      forward: what runs.
      layer: layer number.
      boundary: the first decoder layer, the last owner of compressed entries.
      layers: number of backbone layers.
      window: `W`.
    """
    start, resume, end = forward.start, forward.resume, forward.end
    row = np.arange(start, end)
    if not forward.decoder_replay or layer < boundary:
        every = np.ones(end - start, bool)
        bank = _encoder_windows(forward, window)
        return LayerVisibility(every, every, bank, write_from=_kept(forward), keep_below=_warm(forward))
    tail = forward.tail_start(window)
    runs = row >= tail
    queries = row == end - 1 if forward.is_final and layer == layers - 1 else runs
    positions = np.arange(end)
    seen = queries[:, None] & (positions <= row[:, None]) & (positions >= np.maximum(tail, row - window + 1)[:, None])
    bank = np.where(seen, np.int8(FROM_FORWARD), np.int8(HIDDEN))
    return LayerVisibility(queries, runs, bank, write_from=_kept(forward) if resume > start else 0)


def _kept(forward: ReplayForward) -> int:
    """Groups ending below this position are not written."""
    return forward.resume if forward.resume > forward.start else 0


def _warm(forward: ReplayForward) -> int:
    """Rows below this position change neither rings nor tails."""
    return 0 if forward.rebuild else _kept(forward)


def _encoder_windows(forward: ReplayForward, window: int) -> NDArray[np.int8]:
    """[rows, end] window of every row where all rows run."""
    start, resume, end = forward.start, forward.resume, forward.end
    row, position = np.arange(start, end)[:, None], np.arange(end)[None, :]
    seen = (position <= row) & (position > row - window)
    if resume == start:
        bank = np.where(position < start, FROM_STATE, FROM_FORWARD)
    elif forward.rebuild:
        seen &= position >= start
        bank = np.full(seen.shape, FROM_FORWARD)
    else:
        seen &= (row >= resume) | (position >= start)
        bank = np.where((row >= resume) & (position < resume), FROM_STATE, FROM_FORWARD)
    return np.where(seen, bank, HIDDEN).astype(np.int8)


class ReplayOracle:
    """Runs a reference model over the forwards of a serving history.

    Rows that a forward leaves undefined are NaN in its logits: every row but a final forward's last one under decoder
    replay.

    Args of the constructor:
      model: the reference model; its last owner must have ratio 1.
    """

    def __init__(self, model: ReferenceModel):
        config = model.config
        self.model = model
        self.boundary, ratio = config.owners[-1]
        self.layers = config.text.num_hidden_layers
        self.window = config.text.sliding_window
        if ratio != 1:
            raise ValueError(f"the last owner, layer {self.boundary}, has ratio {ratio}: the oracle knows ratio 1 only")

    def forward(
        self,
        token_ids: ArrayLike,
        state: SequenceState | None,
        forward: ReplayForward,
        image_rows: ArrayLike | None = None,
        image_embeddings: ArrayLike | None = None,
        *,
        record: bool = False,
    ) -> ReferenceOutput:
        """Logits of one forward and the state after it; arguments as of `ReferenceModel.forward`.

        Args:
          token_ids: [end - start] ids of the rows.
          state: of the request: `state.length` positions are valid, as many as `forward.resume`.
          forward: what runs.
          image_rows: [end - start] bool.
          image_embeddings: [image rows, D].
          record: keep layer records.
        """

        def visibility(layer: int) -> LayerVisibility:
            return self.visibility(forward, layer)

        return self.model.forward(
            token_ids,
            image_rows,
            image_embeddings,
            state=state,
            start=forward.start,
            visibility=visibility,
            record=record,
        )

    def visibility(self, forward: ReplayForward, layer: int) -> LayerVisibility:
        """`layer_visibility` of this model."""
        return layer_visibility(forward, layer, boundary=self.boundary, layers=self.layers, window=self.window)


def reused_prefix(state: SequenceState, length: int, ratios: dict[int, int]) -> SequenceState:
    """What a request on a fresh slot has after a hit: compressed entries and keys, no windows and no projections.

    Args:
      state: of a request with the same first `length` tokens.
      length: of the hit, a multiple of every ratio.
      ratios: owner -> ratio.
    """
    return SequenceState(
        length=length,
        compressed_ids=state.compressed_ids[:length],
        compressed={owner: table[: length // ratios[owner]] for owner, table in state.compressed.items()},
        index_keys={owner: table[: length // ratios[owner]] for owner, table in state.index_keys.items()},
    )
