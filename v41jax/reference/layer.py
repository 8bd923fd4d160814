"""One backbone layer of the reference: Engram update, attention sublayer, FFN sublayer, and what it remembers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from v41jax.config import CandidateRole, LayerMode, LayerTopology, ModelConfig
from v41jax.reference import engram, feed_forward
from v41jax.reference.attention import attend, grouped_output, pool_pairs
from v41jax.reference.hyper_connections import Mixes, collapse, expand, mixes
from v41jax.reference.numerics import Arithmetic, Float, rms_norm, rope_frequencies, rope_tables, rotate
from v41jax.reference.records import ForwardInputs, ForwardMemory, LayerRecord, LayerVisibility, extended
from v41jax.reference.selection import index_scores, select_candidates, select_topk, within_candidates
from v41jax.reference.weights import Weights


class ReferenceLayer:
    """The arithmetic of one layer over the rows of one forward; holds no state of a sequence.

    `name` is the prefix of its tensors; by default `layers.{index}`.
    """

    def __init__(
        self,
        topology: LayerTopology,
        config: ModelConfig,
        weights: Weights,
        arithmetic: Arithmetic,
        name: str | None = None,
    ):
        self.topology = topology
        self._text = config.text
        self._weights = weights
        self._arithmetic = arithmetic
        self._name = f"layers.{topology.index}" if name is None else name
        self._frequencies = rope_frequencies(config.text, compressed=topology.ratio > 0)

    def run(
        self,
        streams: Float,
        pre_mix: Float,
        inputs: ForwardInputs,
        memory: ForwardMemory,
        visibility: LayerVisibility,
    ) -> LayerRecord:
        """The layer on rows whose streams are numbers; rows of NaN streams stay out of everything.

        Args:
          streams: [m, S, D]; pre_mix: [m, S], as the layer before hands them on.
          memory: read and extended (window rows, compressed rows, index keys, selections, candidates).

        Returns:
          The record of the layer, whose `streams` and `pre_mix` feed the next one.
        """
        text, arithmetic = self._text, self._arithmetic
        alive = np.flatnonzero(~np.isnan(pre_mix).any(axis=1))
        record = self._blank(streams, pre_mix)
        if self.topology.engram is not None:
            self._update_from_engram(record, alive, inputs)

        residual = record.mixed_streams
        attention_input = rms_norm(
            collapse(residual[alive], pre_mix[alive], arithmetic),
            self._weights.plain(f"{self._name}.attn_norm.weight"),
            text.rms_norm_eps,
            arithmetic,
        )
        record.attention_input[alive] = attention_input
        quantized = np.full_like(record.attention_input, np.nan)
        quantized[alive] = arithmetic.q8(attention_input, f"{self._name}.attention_input")

        if self.topology.mode is LayerMode.FULL:
            self._compress(record, alive, inputs, memory, visibility)
        window_before, window_now = self._window(record, quantized, inputs, memory, visibility)

        rows = np.flatnonzero(visibility.query_rows & ~np.isnan(pre_mix).any(axis=1))
        if not rows.size:
            return record
        positions = inputs.positions[rows]
        low_rank = rms_norm(
            arithmetic.activation(quantized[rows] @ self._dense("attn.wq_a").T),
            self._weights.plain(f"{self._name}.attn.q_norm.weight"),
            text.rms_norm_eps,
            arithmetic,
        )
        low_rank = arithmetic.q8(low_rank, f"{self._name}.low_rank_query")
        if self.topology.mode in (LayerMode.FULL, LayerMode.REINDEX):
            self._select(record, rows, low_rank, positions, memory)
        if self.topology.topk_owner is not None:
            record.topk = memory.selections[self.topology.topk_owner]

        cos, sin = rope_tables(self._frequencies, positions)
        query = arithmetic.activation(low_rank @ self._dense("attn.wq_b").T)
        query = rotate(query.reshape(rows.size, text.num_attention_heads, text.head_dim), cos, sin, arithmetic)
        attended = attend(
            query,
            self._weights.plain(f"{self._name}.attn.attn_sink"),
            window_before,
            window_now,
            visibility.window[rows],
            memory.state.compressed[self.topology.kv_owner] if self.topology.kv_owner is not None else None,
            record.topk[rows] if record.topk is not None else None,
            text.head_dim**-0.5,
            arithmetic,
        )
        attended = rotate(attended, cos, -sin, arithmetic)
        record.query, record.attended = self._spread(query, rows, record), self._spread(attended, rows, record)
        grouped = grouped_output(attended, self._dense("attn.wo_a"), text.o_groups, arithmetic)
        output = arithmetic.q8(grouped, f"{self._name}.grouped_output") @ self._dense("attn.wo_b").T
        record.attention_output[rows] = arithmetic.activation(output)

        coefficients = self._mixes(residual[rows], "attn")
        between = expand(record.attention_output[rows], residual[rows], coefficients, arithmetic)
        record.attention_streams[rows] = between
        record.attention_pre_mix[rows] = coefficients.pre
        record.attention_post = self._spread(coefficients.post, rows, record)
        record.attention_combination = self._spread(coefficients.combination, rows, record)
        self._feed_forward(record, rows, between, coefficients.pre, inputs)
        return record

    def _spread(self, values: Float, rows: NDArray[np.intp], record: LayerRecord) -> Float:
        """Values of some rows as values of all rows, NaN elsewhere."""
        result = np.full((record.input_pre_mix.shape[0], *values.shape[1:]), np.nan)
        result[rows] = values
        return result

    def _dense(self, name: str) -> Float:
        return self._weights.dense(f"{self._name}.{name}")

    def _blank(self, streams: Float, pre_mix: Float) -> LayerRecord:
        m, _, width = streams.shape
        text = self._text

        def empty(*shape: int) -> Float:
            return np.full((m, *shape), np.nan)

        return LayerRecord(
            layer=self.topology.index,
            input_streams=streams,
            input_pre_mix=pre_mix,
            mixed_streams=streams,
            streams=np.full_like(streams, np.nan),
            pre_mix=np.full_like(pre_mix, np.nan),
            attention_pre_mix=np.full_like(pre_mix, np.nan),
            attention_input=empty(width),
            attention_output=empty(width),
            attention_streams=np.full_like(streams, np.nan),
            ffn_input=empty(width),
            ffn_output=empty(width),
            window_rows=empty(text.head_dim),
            router_scores=empty(text.n_routed_experts),
            router_choices=np.full((m, text.num_experts_per_tok), -1, np.int32),
            router_weights=empty(text.num_experts_per_tok),
        )

    def _mixes(self, streams: Float, sublayer: str) -> Mixes:
        fn, scale, base = (
            self._weights.plain(f"{self._name}.hc_{sublayer}_{part}") for part in ("fn", "scale", "base")
        )
        return mixes(streams, fn, scale, base, self._text)

    def _update_from_engram(self, record: LayerRecord, alive: NDArray[np.intp], inputs: ForwardInputs) -> None:
        ordinal = self.topology.engram
        assert ordinal is not None
        prefix = f"{self._name}.engram"
        gate_weights = self._weights.plain(f"{prefix}.q_weight") * self._weights.plain(f"{prefix}.k_weight")
        updated, gate = engram.update(
            record.input_streams[alive],
            inputs.engram_rows[ordinal][alive],
            inputs.dead[alive],
            self._dense("engram.wkv"),
            gate_weights,
            self._text.rms_norm_eps,
            self._arithmetic,
            prefix,
        )
        record.mixed_streams = np.full_like(record.input_streams, np.nan)
        record.mixed_streams[alive] = updated
        record.engram_gates = np.full_like(record.input_pre_mix, np.nan)
        record.engram_gates[alive] = gate
        record.engram_row_ids = inputs.engram_row_ids[:, ordinal]
        record.engram_rows = inputs.engram_rows[ordinal]

    def _window(
        self,
        record: LayerRecord,
        quantized: Float,
        inputs: ForwardInputs,
        memory: ForwardMemory,
        visibility: LayerVisibility,
    ) -> tuple[Float, Float]:
        """Window rows by position, [n, d]: those the state held before this forward, and those of this forward."""
        text, arithmetic, layer = self._text, self._arithmetic, self.topology.index
        rows = np.flatnonzero(visibility.window_rows)
        cos, sin = rope_tables(self._frequencies, inputs.positions[rows])
        kv = rms_norm(
            arithmetic.activation(quantized[rows] @ self._dense("attn.wkv").T),
            self._weights.plain(f"{self._name}.attn.kv_norm.weight"),
            text.rms_norm_eps,
            arithmetic,
        )
        kv = arithmetic.q8(rotate(kv, cos, sin, arithmetic), f"{self._name}.window")
        record.window_rows[rows] = kv
        stop = inputs.start + inputs.positions.size
        before = extended(memory.state.window.get(layer), stop, text.head_dim)
        now = np.full_like(before, np.nan)
        now[inputs.positions[rows]] = kv
        stored = before.copy()
        written = rows[inputs.positions[rows] >= visibility.keep_below]
        stored[inputs.positions[written]] = record.window_rows[written]
        memory.state.window[layer] = stored
        return before, now

    def _compress(
        self,
        record: LayerRecord,
        alive: NDArray[np.intp],
        inputs: ForwardInputs,
        memory: ForwardMemory,
        visibility: LayerVisibility,
    ) -> None:
        """Extends the owner's compressed rows and index keys by the groups that close in this forward."""
        text, arithmetic, state = self._text, self._arithmetic, memory.state
        layer, ratio = self.topology.index, self.topology.ratio
        prefix = f"{self._name}.attn.compressor"
        u = record.attention_input
        stop = inputs.start + inputs.positions.size
        entries = stop // ratio
        closed = (np.arange(entries) + 1) * ratio - 1
        fresh = np.flatnonzero((closed >= inputs.start) & (closed >= visibility.write_from))
        values = u[alive] @ self._weights.plain(f"{prefix}.wkv.weight").T
        if ratio == 1:
            by_position = np.full((stop, text.head_dim), np.nan)
            by_position[inputs.positions[alive]] = arithmetic.activation(values)
            pooled = by_position[fresh]
        else:
            gates = u[alive] @ self._weights.plain(f"{prefix}.wgate.weight").T
            held = state.projections.get(layer, (None, None))
            members = fresh[:, None] * ratio + np.arange(ratio)
            kept = inputs.positions[alive] >= visibility.keep_below
            tables = []
            for old, new in zip(held, (values, gates)):
                table = extended(old, stop, text.head_dim)
                table[inputs.positions[alive][kept]] = new[kept]
                tables.append(table)
            state.projections[layer] = (tables[0], tables[1])
            pooled = arithmetic.activation(pool_pairs(tables[0][members], tables[1][members]))
        latent = rms_norm(pooled, self._weights.plain(f"{prefix}.norm.weight"), text.rms_norm_eps, arithmetic)

        cos, sin = rope_tables(self._frequencies, fresh * ratio)
        indexer = f"{self._name}.attn.indexer"
        key = rms_norm(
            arithmetic.activation(latent @ self._weights.plain(f"{indexer}.wk.weight").T),
            self._weights.plain(f"{indexer}.k_norm.weight"),
            text.rms_norm_eps,
            arithmetic,
        )
        key = arithmetic.index_key(rotate(key, cos, sin, arithmetic), f"{self._name}.index_key")
        compressed = arithmetic.q4n(rotate(latent, cos, sin, arithmetic), f"{self._name}.compressed")
        for memory_of, new, width in (
            (state.index_keys, key, text.index_head_dim),
            (state.compressed, compressed, text.head_dim),
        ):
            table = extended(memory_of.get(layer), entries, width)
            table[fresh] = new
            memory_of[layer] = table
        record.compressed, record.index_keys = state.compressed[layer], state.index_keys[layer]

    def _select(
        self,
        record: LayerRecord,
        rows: NDArray[np.intp],
        low_rank: Float,
        positions: NDArray[np.int64],
        memory: ForwardMemory,
    ) -> None:
        """Scores this source's entries, and publishes its selection (and, at the candidate source, its blocks)."""
        text, arithmetic, topology = self._text, self._arithmetic, self.topology
        assert topology.kv_owner is not None
        indexer = f"{self._name}.attn.indexer"
        cos, sin = rope_tables(self._frequencies, positions)
        query = arithmetic.activation(low_rank @ self._weights.dense(f"{indexer}.wq_b").T)
        query = query.reshape(rows.size, text.index_n_heads, text.index_head_dim)
        query = arithmetic.index_query(rotate(query, cos, sin, arithmetic), f"{self._name}.index_query")
        factor = text.index_head_dim**-0.5 * text.index_n_heads**-0.5
        projected = record.attention_input[rows] @ self._weights.plain(f"{indexer}.weights_proj.weight").T
        head_weights = arithmetic.activation(arithmetic.activation(projected) * factor)

        keys = memory.state.index_keys[topology.kv_owner]
        visible = (positions + 1) // topology.ratio
        scores = index_scores(query, keys, head_weights, visible, arithmetic)
        m = record.input_pre_mix.shape[0]
        if topology.candidates is CandidateRole.PUBLISHES:
            blocks = select_candidates(scores, visible, text.candidate_topk_blocks, text.candidate_block_size)
            published = np.full((m, text.candidate_topk_blocks), -1, np.int32)
            published[rows] = blocks
            memory.candidates[topology.index] = record.candidate_blocks = published
        elif topology.candidates is CandidateRole.CONSUMES:
            blocks = memory.candidates[text.candidate_source_layer_id][rows]
            inside = within_candidates(blocks, text.candidate_block_size, keys.shape[0])
            scores = np.where(inside, scores, -np.inf)
        selection = np.full((m, text.index_topk), -1, np.int32)
        selection[rows] = select_topk(scores, text.index_topk)
        memory.selections[topology.index] = selection
        record.index_query = np.full((m, *query.shape[1:]), np.nan)
        record.index_head_weights = np.full((m, text.index_n_heads), np.nan)
        record.index_scores = np.full((m, keys.shape[0]), np.nan)
        record.index_query[rows], record.index_head_weights[rows] = query, head_weights
        record.index_scores[rows] = scores

    def _feed_forward(
        self, record: LayerRecord, rows: NDArray[np.intp], streams: Float, pre_mix: Float, inputs: ForwardInputs
    ) -> None:
        text, arithmetic, weights = self._text, self._arithmetic, self._weights
        prefix = f"{self._name}.ffn"
        coefficients = self._mixes(streams, "ffn")
        x = rms_norm(
            collapse(streams, pre_mix, arithmetic),
            weights.plain(f"{self._name}.ffn_norm.weight"),
            text.rms_norm_eps,
            arithmetic,
        )
        scores, choices, routing = feed_forward.route(
            x,
            weights.plain(f"{prefix}.gate.weight"),
            weights.plain(f"{prefix}.gate.bias"),
            weights.plain(f"{prefix}.gate.bias_vl"),
            inputs.image_rows[rows],
            text,
        )

        def matrices(expert: int) -> feed_forward.Matrices:
            name = f"{prefix}.experts.{expert}"
            return weights.expert(f"{name}.w1"), weights.expert(f"{name}.w2"), weights.expert(f"{name}.w3")

        shared = tuple(weights.dense(f"{prefix}.shared_experts.{part}") for part in ("w1", "w2", "w3"))
        mixed = feed_forward.mixture(x, choices, routing, matrices, shared, text.swiglu_limit, arithmetic, self._name)
        y = mixed.output
        record.ffn_input[rows], record.ffn_output[rows] = x, y
        record.router_logits = self._spread(x @ weights.plain(f"{prefix}.gate.weight").T / text.gate_temp, rows, record)
        record.routed_output = self._spread(mixed.routed, rows, record)
        record.shared_output = self._spread(mixed.shared, rows, record)
        record.ffn_post = self._spread(coefficients.post, rows, record)
        record.ffn_combination = self._spread(coefficients.combination, rows, record)
        record.router_scores[rows] = scores
        record.router_choices[rows] = choices
        record.router_weights[rows] = routing
        record.streams[rows] = expand(y, streams, coefficients, arithmetic)
        record.pre_mix[rows] = coefficients.pre
