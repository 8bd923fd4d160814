"""The reference model of one sequence: embedding, every layer, head; whole, in chunks, or one layer at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from checkpoints.engram_tables import EngramTables
from checkpoints.load import Checkpoint
from scheduler.batch import DEAD
from v41jax import quantization_numpy as codecs
from v41jax.engram_hashing import EngramHasher, history_before
from v41jax.reference.hyper_connections import collapse, identity_pre_mix
from v41jax.reference.layer import ReferenceLayer
from v41jax.reference.numerics import Arithmetic, Float, rms_norm
from v41jax.reference.records import (
    ForwardInputs,
    ForwardMemory,
    LayerRecord,
    LayerVisibility,
    ReferenceOutput,
    SequenceState,
)
from v41jax.reference.weights import Weights
from v41jax.token_map import load_token_map

Visibility = Callable[[int], LayerVisibility]
"""Layer number -> what its rows run and see."""


class ReferenceModel:
    """A float64 NumPy transcription of the model specification, for one sequence at a time.

    Args of the constructor:
      checkpoint: open, text scope; stays open as long as the model is used.
      rounding: "none", or "bfloat16" for the released rounding points.
      activation_quantization: apply the activation formats.
      index_rounding: "bfloat16" rounds index scores where the published code does.
      index_format: "fp4" (as trained) or "fp8" (as the FP8 index plane stores keys).
      token_map: [n >= vocab_size] int32; None reads the checkpoint's own.
      keep_weights: hold widened weights; turn off for large layers.
      probe: see `Arithmetic.probe`.

    The model is a context manager; leaving it closes the Engram tables, not the checkpoint.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        rounding: str = "none",
        activation_quantization: bool = True,
        index_rounding: str = "none",
        index_format: str = "fp4",
        token_map: NDArray[np.int32] | None = None,
        keep_weights: bool = True,
        probe: Callable[[str, Float, Callable[[Float], Float]], Float] | None = None,
    ):
        self.config = checkpoint.config
        self.arithmetic = Arithmetic(rounding, activation_quantization, index_rounding, index_format, probe)
        self._weights = Weights(checkpoint, keep=keep_weights)
        self._layers = tuple(
            ReferenceLayer(topology, self.config, self._weights, self.arithmetic) for topology in self.config.layers
        )
        self._tables: EngramTables | None = None
        self._hasher: EngramHasher | None = None
        if self.config.text.engram_layer_ids:
            if token_map is None:
                token_map = load_token_map(checkpoint.directory, self.config)
            self._hasher = EngramHasher(self.config, token_map)
            self._tables = EngramTables.open(checkpoint)

    def __enter__(self) -> ReferenceModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the Engram tables; the model cannot be used afterwards."""
        if self._tables is not None:
            self._tables.close()

    def forward(
        self,
        token_ids: ArrayLike,
        image_rows: ArrayLike | None = None,
        image_embeddings: ArrayLike | None = None,
        *,
        state: SequenceState | None = None,
        start: int | None = None,
        visibility: Visibility | None = None,
        record: bool = True,
    ) -> ReferenceOutput:
        """Logits of every row of one sequence, or of its next chunk.

        Args:
          token_ids: [m] ids; not read at image rows.
          image_rows: [m] bool, rows of image spans, delimiters included.
          image_embeddings: [image rows, D] in row order, delimiters included.
          state: what earlier forwards of the sequence left; None starts it. Not changed.
          start: position of the first row; by default `state.length`. A smaller one recomputes positions, with
            `visibility` saying what is kept.
          visibility: per layer, for replay; None is the exact causal forward.
          record: keep a `LayerRecord` of every layer.
        """
        inputs, memory = self.begin(token_ids, image_rows, image_embeddings, state=state, start=start)
        streams, pre_mix = self.first_streams(inputs)
        records = []
        for layer in self._layers:
            index = layer.topology.index
            result = self.run_layer(
                index, streams, pre_mix, inputs, memory, visibility(index) if visibility is not None else None
            )
            streams, pre_mix = result.streams, result.pre_mix
            if record:
                records.append(result)
        memory.state.length = inputs.start + inputs.positions.size
        logits, hidden = self.head(streams, pre_mix)
        return ReferenceOutput(logits, hidden, tuple(records), memory.state)

    def begin(
        self,
        token_ids: ArrayLike,
        image_rows: ArrayLike | None = None,
        image_embeddings: ArrayLike | None = None,
        *,
        state: SequenceState | None = None,
        start: int | None = None,
    ) -> tuple[ForwardInputs, ForwardMemory]:
        """What all layers of a forward read; arguments as in `forward`.

        Raises:
          ValueError: ids, rows and embeddings that do not fit each other, or a start past the state.
        """
        text = self.config.text
        ids = np.asarray(token_ids, np.int64)
        image = np.zeros(ids.size, bool) if image_rows is None else np.asarray(image_rows, bool)
        state = SequenceState() if state is None else state.copy()
        start = state.length if start is None else start
        given = 0 if image_embeddings is None else len(np.asarray(image_embeddings))
        faults = []
        if ids.ndim != 1 or not ids.size:
            faults.append(f"token_ids has shape {ids.shape}, must be one or more ids")
        if image.shape != ids.shape:
            faults.append(f"image_rows has shape {image.shape} where token_ids has {ids.shape}")
        elif given != image.sum():
            faults.append(f"{given} image embeddings for {image.sum()} image rows")
        elif ((ids < 0) | (ids >= text.vocab_size))[~image].any():
            faults.append(f"a token id lies outside 0..{text.vocab_size - 1}")
        if not 0 <= start <= state.length:
            faults.append(f"start {start} is outside 0..{state.length}, the positions processed")
        if faults:
            raise ValueError("; ".join(faults))

        embeddings = self._weights.plain("embed.weight")[np.where(image, 0, ids)]
        if given:
            embeddings[image] = self.arithmetic.activation(np.asarray(image_embeddings, np.float64))
        row_ids, rows, compressed = self._engram(ids, image, state, start)
        state.compressed_ids = np.concatenate([state.compressed_ids[:start], compressed])
        inputs = ForwardInputs(
            start=start,
            positions=np.arange(start, start + ids.size),
            image_rows=image,
            embeddings=embeddings,
            engram_row_ids=row_ids,
            engram_rows=rows,
            dead=compressed == DEAD,
        )
        return inputs, ForwardMemory(state)

    def first_streams(self, inputs: ForwardInputs) -> tuple[Float, Float]:
        """Streams [m, S, D] and pre-mix [m, S] that enter layer 0."""
        count = self.config.text.hc_mult
        streams = np.repeat(inputs.embeddings[:, None], count, axis=1)
        return streams, identity_pre_mix(streams.shape[0], count)

    def run_layer(
        self,
        layer: int,
        streams: ArrayLike,
        pre_mix: ArrayLike,
        inputs: ForwardInputs,
        memory: ForwardMemory,
        visibility: LayerVisibility | None = None,
    ) -> LayerRecord:
        """One layer from given streams [m, S, D] and pre-mix [m, S] (teacher forcing).

        `memory` must hold what the layer shares: its owner's compressed rows and keys, its source's selection and
        candidates. Running the layers in order fills it; entries may be replaced by recorded ones.
        """
        if visibility is None:
            stop = inputs.start + inputs.positions.size
            visibility = LayerVisibility.causal(inputs.start, stop, self.config.text.sliding_window)
        return self._layers[layer].run(
            np.asarray(streams, np.float64), np.asarray(pre_mix, np.float64), inputs, memory, visibility
        )

    def head(self, streams: Float, pre_mix: Float) -> tuple[Float, Float]:
        """Logits [m, V] and the normed collapse [m, D] (model specification, "Final norm and head")."""
        collapsed = collapse(streams, pre_mix, self.arithmetic)
        weight = self._weights.plain("norm.weight")
        hidden = rms_norm(collapsed, weight, self.config.text.rms_norm_eps, self.arithmetic)
        return hidden @ self._weights.plain("head.weight").T, hidden

    def _engram(
        self, ids: NDArray[np.int64], image: NDArray[np.bool_], state: SequenceState, start: int
    ) -> tuple[NDArray[np.int64], tuple[Float, ...], NDArray[np.int32]]:
        """Row ids [m, layers, columns], dequantized rows per layer, and compressed ids [m]."""
        if self._hasher is None or self._tables is None:
            return np.zeros((ids.size, 0, 0), np.int64), (), np.where(image, DEAD, 0).astype(np.int32)
        compressed = self._hasher.compress(ids, image)
        history = history_before(state.compressed_ids, start, self._hasher.history_size)
        row_ids = self._hasher.row_ids(np.concatenate([history, compressed]))
        live = compressed != DEAD
        width = self._hasher.columns * self.config.text.engram_head_dim
        tables = []
        for ordinal in range(row_ids.shape[1]):
            rows = np.zeros((ids.size, width))
            stored = self._tables.gather(ordinal, row_ids[live, ordinal].reshape(-1))
            rows[live] = codecs.dequantize_rows(*stored).reshape(-1, width)
            tables.append(rows)
        return row_ids, tuple(tables), compressed
