"""The float64 reference as one side of a comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from checkpoints.load import Checkpoint
from v41jax.comparison.operations import LAYER
from v41jax.comparison.options import Options
from v41jax.comparison.recording import Recording
from v41jax.config import ModelConfig
from v41jax.reference.model import ReferenceModel
from v41jax.reference.records import LayerRecord
from v41jax.reference.replay_oracle import ReplayOracle
from v41jax.replay_distance import MODES_BY_SIDE, reference_continuation_logits

_SITES = {
    "attention_input": "attention_input",
    "compressed": "compressed_kv",
    "index_key": "index_key",
    "window": "window_kv",
    "low_rank_query": "low_rank_query",
    "index_query": "index_query",
    "grouped_output": "grouped_output",
    "ffn_input": "ffn_input",
    "shared_experts.hidden": "shared_hidden",
}
"""Quantizer site of the reference -> operation whose tensor enters it."""

_PARTS = {"compressed": "main", "window": "window", "index_key": "index", "index_query": "index"}
"""Last word of a quantizer site -> what it rounds, of `options.PARTS`; all others are activations."""

NEAR = 1e-6
"""Distance to a rounding boundary, relative to magnitude plus root mean square, that float32 noise may cross."""

_RECORDED = tuple(operation.name for operation in LAYER)


class ReferenceSubject:
    """Runs the reference; see `subjects.Subject`. Arguments of the constructor as of `JaxSubject`."""

    def __init__(self, directory: Path, options: Options, max_model_len: int = 0, continuation: int = 16):
        self.options = options
        self._max_model_len, self._continuation = max_model_len, continuation
        self._stack = contextlib.ExitStack()
        checkpoint = self._stack.enter_context(Checkpoint.open(directory, scopes=("text",)))
        self._before: dict[str, NDArray] = {}
        self._near: dict[str, NDArray] = {}
        precision = options.precision
        self._model = self._stack.enter_context(
            ReferenceModel(
                checkpoint,
                rounding="bfloat16" if precision.activation_dtype == jnp.bfloat16 else "none",
                activation_quantization=precision.activation_quantization,
                index_rounding="bfloat16" if precision.index_score_dtype == jnp.bfloat16 else "none",
                index_format=options.index_format,
                probe=self._probe,
            )
        )
        self.config: ModelConfig = self._model.config

    def close(self) -> None:
        """Closes the files."""
        self._stack.close()

    def logits(self, ids: NDArray[np.int32]) -> NDArray:
        """Logits free running: of every row, [n, V], or under replay of the last rows."""
        if self.options.replay is not None:
            mode, oracle = MODES_BY_SIDE[self.options.replay], ReplayOracle(self._model)
            return reference_continuation_logits(oracle, ids, mode, self._continuation, self._max_model_len)
        state, parts, start = None, [], 0
        for stop in self.options.stops(len(ids)):
            output = self._model.forward(ids[start:stop], state=state, record=False)
            parts.append(output.logits)
            state, start = output.state, stop
        return np.concatenate(parts)

    def observe(self, ids: NDArray[np.int32], given: Recording | None = None, *, until: int | None = None) -> Recording:
        """Every layer's tensors; each layer's inputs are `given`'s where it is not None."""
        model = self._model
        inputs, memory = model.begin(ids)
        streams, pre_mix = model.first_streams(inputs)
        embedding, layers, entered = streams, [], []
        for topology in self.config.layers[:until]:
            layer = topology.index
            if given is not None and given.layer_inputs is not None:
                streams, pre_mix = (part[layer].astype(np.float64) for part in given.layer_inputs)
            entered.append((streams, pre_mix))
            self._before, self._near = {}, {}
            record = model.run_layer(layer, streams, pre_mix, inputs, memory)
            layers.append(self._tensors(record, layer))
            streams, pre_mix = record.streams, record.pre_mix
            if given is not None and "topk" in given.layers[layer] and record.index_scores is not None:
                memory.selections[layer] = _wide(given.layers[layer]["topk"], self.config.text.index_topk)
            if given is not None and "candidate_blocks" in given.layers[layer] and record.candidate_blocks is not None:
                memory.candidates[layer] = given.layers[layer]["candidate_blocks"]
        together = (np.stack([part[0] for part in entered]), np.stack([part[1] for part in entered]))
        if until is not None:
            return Recording(ids, layers, embedding, layer_inputs=together)
        if given is not None and "streams" in given.layers[-1] and "pre_mix" in given.layers[-1]:
            streams, pre_mix = (given.layers[-1][name].astype(np.float64) for name in ("streams", "pre_mix"))
        logits, hidden = model.head(streams, pre_mix)
        return Recording(ids, layers, embedding, hidden, logits, together)

    def _tensors(self, record: LayerRecord, layer: int) -> dict[str, NDArray]:
        tensors: dict[str, NDArray] = {}
        for name in _RECORDED:
            value = getattr(record, name, None)
            if value is not None:
                tensors[name] = value
        if self.config.layers[layer].engram is None:
            tensors.pop("mixed_streams")
        for site, name in _SITES.items():
            value = self._before.get(f"layers.{layer}.{site}")
            if value is not None:
                tensors[name] = value
        experts = f"layers.{layer}.experts."
        near = np.zeros(len(record.input_pre_mix), bool)
        for site, rows in self._near.items():
            if site.startswith(experts):
                expert = int(site.removeprefix(experts).split(".")[0])
                chosen = np.nonzero(record.router_choices == expert)[0]
                near[chosen] |= rows
        tensors["experts_near_boundary"] = near
        return tensors

    def _probe(self, site: str, x: NDArray, quantize: Callable[[NDArray], NDArray]) -> NDArray:
        self._before[site] = x
        only = self.options.only
        if only is not None and _PARTS.get(site.rpartition(".")[2], "activations") not in only:
            return x
        quantized = quantize(x)
        if ".experts." in site and self.options.precision.activation_quantization:
            reach = NEAR * (np.abs(x) + np.sqrt(np.mean(x * x, axis=-1, keepdims=True)))
            moved = (quantize(x + reach) != quantized) | (quantize(x - reach) != quantized)
            self._near[site] = moved.any(axis=-1)
        return quantized


def _wide(topk: NDArray, width: int) -> NDArray[np.int32]:
    """-1 padded on the right to `width` columns."""
    result = np.full((topk.shape[0], width), -1, np.int32)
    result[:, : topk.shape[1]] = topk
    return result
