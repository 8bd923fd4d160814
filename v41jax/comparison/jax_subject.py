"""The JAX model as one side of a comparison: its layers observed one by one, and its serving forward free running."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from checkpoints.load import Checkpoint
from pallas_kernels.arithmetic import decode_main_row
from pallas_kernels.index_plane import decoded_keys, logical_plane
from pallas_kernels.stored_rows import load_rows
from scheduler.pools import Pools, allocate, poison
from v41jax.comparison.options import Options
from v41jax.comparison.recording import Recording
from v41jax.comparison.watch import watching
from v41jax.config import LayerTopology
from v41jax.engram_hashing import history_before
from v41jax.flow import Flow
from v41jax.full_forward import compressed_of, engram_rows_of, full_forward, load_model
from v41jax.layers.attention import Selection
from v41jax.layers.hyper_connections import collapse
from v41jax.layers.norm import rms_norm
from v41jax.model import embed, head, prepare_step, run_layer
from v41jax.parameters import WeightForm, layer_weights
from v41jax.replay_distance import MODES_BY_SIDE, continuation_logits, replay_page
from v41jax.slot_state import prepare_slots
from v41jax.spans import Span, batch_of


class JaxSubject:
    """Runs the JAX model; see `subjects.Subject`.

    Args of the constructor:
      directory: checkpoint.
      options: of this side.
      max_model_len: longest prompt.
      continuation: under replay, the last tokens of a prompt, which are fed one after the other.
    """

    def __init__(self, directory: Path, options: Options, max_model_len: int, continuation: int = 16):
        self.options = options
        self._continuation = continuation
        with Checkpoint.open(directory, scopes=("text",)) as checkpoint:
            self.config = checkpoint.config
        self.loaded = load_model(
            directory,
            options.precision,
            max_model_len=max_model_len,
            form=cast(WeightForm, options.weights),
            kernels="pallas" if options.kind == "pallas" else "xla",
            parallel=options.parallel,
            packed=options.packed,
            index_format=options.index_format,
            block_size=None if options.replay is None else replay_page(self.config),
        )

    def close(self) -> None:
        """Closes the files."""
        self.loaded.__exit__()

    def logits(self, ids: NDArray[np.int32]) -> NDArray:
        """Logits free running, by the compiled serving forward: of every row, or under replay of the last rows."""
        loaded = self.loaded
        if self.options.replay is not None:
            return continuation_logits(loaded, ids, MODES_BY_SIDE[self.options.replay], self._continuation)
        result = full_forward(loaded.params, ids, loaded.setup, loaded.lookup, chunks=self.options.chunks)
        return np.asarray(result, np.float64)

    def observe(self, ids: NDArray[np.int32], given: Recording | None = None, *, until: int | None = None) -> Recording:
        """Every layer's tensors, all rows in one forward; each layer's inputs are `given`'s where it is not None."""
        loaded, setup = self.loaded, self.loaded.setup
        geometry, config = setup.geometry, setup.config
        pages = geometry.pages_for(len(ids))
        compressed = compressed_of(loaded.lookup, ids, None)
        history = history_before(compressed, 0, geometry.history_size)
        host = batch_of([Span(0, ids, compressed, 0, range(pages), history)], geometry)
        batch = jax.tree.map(jnp.asarray, host)
        # What nobody wrote is NaN, so that reading it cannot go unseen.
        pools, _ = prepare_slots(poison(allocate(geometry, pages, 1)), batch, "prefill")
        table_rows = jax.tree.map(jnp.asarray, engram_rows_of(setup, loaded.lookup, host))
        step = prepare_step(loaded.params, batch, table_rows, setup, "prefill")
        row_ids = None
        if loaded.lookup is not None:
            row_ids = loaded.lookup.hasher.batch_row_ids(host.compressed_ids, host.history, host.cu_seqlens)

        flow = embed(loaded.params, pools, batch, setup)
        embedding, layers, entered = _array(flow.streams), [], []
        for topology in config.layers[:until]:
            index = topology.index
            if given is not None:
                flow = self._given(flow, given, topology)
            entered.append((_array(flow.streams), _array(flow.pre_mix)))
            weights = layer_weights(loaded.params, config, index)
            with watching() as notes:
                flow, pools, _ = run_layer(weights, topology, flow, pools, step)
            tensors = {name: value[: len(ids)] for name, value in notes.items()}
            if topology.engram is None:
                tensors.pop("mixed_streams", None)
            else:
                tensors["engram_rows"] = _array(step.embedded[topology.engram])[: len(ids)]
                if row_ids is not None:
                    tensors["engram_row_ids"] = np.asarray(row_ids)[: len(ids), topology.engram]
            self._indexer_tensors(tensors, topology, len(ids))
            if topology.kv_owner == index:
                entries = len(ids) // topology.ratio
                tensors |= {name: tensors[name][:entries] for name in ("compressed_kv", "index_key")}
                tensors |= self._memory(pools, topology, entries)
            if "router_logits" in tensors:
                tensors["router_logits"] = tensors["router_logits"] / config.text.gate_temp
            layers.append(tensors)
        together = (np.stack([part[0] for part in entered]), np.stack([part[1] for part in entered]))
        if until is not None:
            return Recording(ids, layers, embedding, layer_inputs=together)
        if given is not None and "streams" in given.layers[-1] and "pre_mix" in given.layers[-1]:
            flow = self._forced(flow, given.layers[-1]["streams"], given.layers[-1]["pre_mix"])
        x = collapse(flow.streams, flow.pre_mix)
        hidden = rms_norm(x, loaded.params.norm, config.text.rms_norm_eps)
        logits = head(loaded.params, flow, config)
        return Recording(ids, layers, embedding, _array(hidden), _array(logits), together)

    def _given(self, flow: Flow, given: Recording, topology: LayerTopology) -> Flow:
        """The flow into a layer as the other side had it, the selections of earlier layers included."""
        if given.layer_inputs is not None:
            flow = self._forced(flow, given.layer_inputs[0][topology.index], given.layer_inputs[1][topology.index])
        source = topology.topk_owner
        if source is not None and source != topology.index and "topk" in given.layers[source]:
            width = self.config.text.index_topk
            topk = np.full((len(given.ids), width), -1, np.int32)
            recorded = given.layers[source]["topk"]
            topk[:, : recorded.shape[1]] = recorded
            flow = flow._replace(
                selection=Selection(jnp.asarray(topk), jnp.asarray((topk >= 0).sum(axis=1), jnp.int32))
            )
        candidates = self.config.text.candidate_source_layer_id
        if 0 <= candidates < topology.index and "candidate_blocks" in given.layers[candidates]:
            flow = flow._replace(candidates=jnp.asarray(given.layers[candidates]["candidate_blocks"], jnp.int32))
        return flow

    def _forced(self, flow: Flow, streams: NDArray, pre_mix: NDArray) -> Flow:
        dtype = self.options.precision.activation_dtype
        return flow._replace(streams=jnp.asarray(streams, dtype), pre_mix=jnp.asarray(pre_mix, jnp.float32))

    def _indexer_tensors(self, tensors: dict[str, NDArray], topology: LayerTopology, rows: int) -> None:
        """Scores by entry, -inf where none may be chosen; entries of the layer's whole memory."""
        chosen = tensors.pop("own_topk", None)
        if chosen is not None:
            tensors["topk"] = chosen
        elif topology.topk_owner is None:
            tensors.pop("topk", None)
        inside, blocks = tensors.pop("candidate_scores", None), tensors.pop("candidates_given", None)
        entries = rows // max(topology.ratio, 1)
        if inside is not None and blocks is not None:
            size = self.config.text.candidate_block_size
            columns = (blocks[:, :, None] * size + np.arange(size)).reshape(rows, -1)
            columns = np.where((np.repeat(blocks, size, axis=1) >= 0) & (columns < entries), columns, entries)
            scores = np.full((rows, entries + 1), -np.inf, np.float32)
            np.put_along_axis(scores, columns, inside, axis=1)
            tensors["index_scores"] = scores[:, :entries]
        elif "index_scores" in tensors:
            tensors["index_scores"] = tensors["index_scores"][:, :entries]

    def _memory(self, pools: Pools, topology: LayerTopology, entries: int) -> dict[str, NDArray]:
        """The owner's whole memory as later readers decode it: the request's pages are 0, 1, .. in order."""
        geometry = self.loaded.setup.geometry
        owner = geometry.owners.index((topology.index, topology.ratio))
        stored = pools.main[owner]
        main = decode_main_row(stored) if geometry.main_format == "fp4" else load_rows(stored, (slice(None),))
        width = self.config.text.index_head_dim
        plane = geometry.index_plane_format
        values, scales = logical_plane(width, pools.index_values[owner], pools.index_scales[owner], plane)
        keys, scale = decoded_keys(values, scales, plane)
        if scale is not None:
            keys = keys * scale[..., None]
        return {"compressed": _flat(main)[:entries], "index_keys": _flat(keys)[:entries]}


def _flat(pages: Sequence) -> NDArray:
    array = _array(pages)
    return array.reshape(-1, array.shape[-1])


def _array(value: object) -> NDArray:
    array = np.asarray(value)
    return array if array.dtype.kind in "iufb" else array.astype(np.float32)
