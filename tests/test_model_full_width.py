"""One layer of each mode at the released width, weights as stored, against the reference, one after the other.

Hidden 5120, 64 heads of 512, top-k 512; 16 experts instead of 384, and a short prompt.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler.batch import EngramRows
from scheduler.pools import allocate
from tests.helpers.memory_checkpoint import MemoryCheckpoint
from v41jax.config import LayerMode, ModelConfig
from v41jax.full_forward import geometry_of
from v41jax.model import Flow, ModelSetup, prepare_step, run_layer
from v41jax.parameters import Parameters, parameter_leaves
from v41jax.precision import Precision
from v41jax.presets import preset_dict
from v41jax.reference.model import ReferenceModel
from v41jax.spans import Span, batch_of

ROWS = 2
MODES = (LayerMode.WINDOW, LayerMode.FULL, LayerMode.REUSE, LayerMode.REINDEX)


def config() -> ModelConfig:
    """Four layers, one of each mode, FULL and its readers at ratio 2; everything else as released."""
    root = preset_dict("v4.1-flash")
    root["image_token_id"] = 500
    root["text_config"] |= {
        "vocab_size": 512,
        "engram_compressed_vocab_size": 400,
        "dspark_noise_token_id": 511,
        "num_hidden_layers": 4,
        "compress_ratios": [0, 2, 2, 2, 0, 0, 0],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": 1,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "n_routed_experts": 16,
        "dspark_target_layer_ids": [1, 2, 3],
    }
    return ModelConfig.from_dict(root)


class Walk:
    """The same prompt through the layers of both models, each layer fed the reference's streams."""

    def __init__(self) -> None:
        self.checkpoint = MemoryCheckpoint(config())
        self.reference = ReferenceModel(self.checkpoint, rounding="bfloat16", keep_weights=False)
        precision = Precision()
        self.setup = ModelSetup(self.checkpoint.config, geometry_of(self.checkpoint.config, precision), precision)
        leaves = parameter_leaves(
            self.checkpoint.config,
            self.checkpoint.describe,
            max_model_len=64,
            form="stored",
            dtype=precision.activation_dtype,
        )
        self.leaves = leaves
        tables = jax.tree.map(lambda leaf: jnp.asarray(leaf.read(self.checkpoint)), (leaves.plain, leaves.yarn))
        self.params = Parameters(None, None, None, *tables, runs=())
        self.pools = allocate(self.setup.geometry, 1, 1)
        ids = np.arange(7, 7 + ROWS, dtype=np.int32)
        zeros = np.zeros(ROWS, np.int32)
        self.batch = batch_of([Span(0, ids, zeros, 0, [0], np.full(3, -1, np.int32))], self.setup.geometry)
        self.inputs, self.memory = self.reference.begin(ids)
        text = self.checkpoint.config.text
        random = np.random.default_rng(0)
        streams = random.standard_normal((ROWS, text.hc_mult, text.hidden_size))
        self.streams = np.asarray(jnp.asarray(streams, jnp.bfloat16), np.float64)
        self.pre_mix = random.uniform(0.1, 1, (ROWS, text.hc_mult)).astype(np.float32)
        self.flow = Flow(*self._given())
        self.results: list[tuple] = []

    def _given(self):
        return jnp.asarray(self.streams, jnp.bfloat16), jnp.asarray(self.pre_mix, jnp.float32)

    def layer(self, layer: int):
        """Ours and the reference's record of one layer, after the layers before it."""
        while len(self.results) <= layer:
            self.results.append(self._next(len(self.results)))
        return self.results[layer]

    def _next(self, layer: int):
        topology = self.checkpoint.config.layers[layer]
        weights = jax.tree.map(lambda leaf: jnp.asarray(leaf.read(self.checkpoint))[0], self.leaves.runs[layer])
        streams, pre_mix = self._given()

        @functools.partial(jax.jit, donate_argnames=("pools",))
        def run(params, weights, flow, pools, batch):
            step = prepare_step(params, batch, EngramRows((), ()), self.setup, "prefill")
            return run_layer(weights, topology, flow, pools, step)

        self.flow, self.pools, _ = run(
            self.params, weights, self.flow._replace(streams=streams, pre_mix=pre_mix), self.pools, self.batch
        )
        record = self.reference.run_layer(layer, self.streams, self.pre_mix, self.inputs, self.memory)
        self.streams, self.pre_mix = record.streams, record.pre_mix.astype(np.float32)
        return self.flow, record


@pytest.fixture(scope="module")
def walk() -> Walk:
    return Walk()


@pytest.mark.parametrize("layer", range(len(MODES)), ids=[mode.value for mode in MODES])
def test_a_layer_of_released_width_agrees_with_the_reference(walk, layer):
    topology = walk.checkpoint.config.layers[layer]
    assert topology.mode is MODES[layer]
    ours, theirs = walk.layer(layer)
    got = np.asarray(ours.streams, np.float64)
    distance = np.linalg.norm(got - theirs.streams) / np.linalg.norm(theirs.streams)
    update = np.linalg.norm(theirs.streams - theirs.input_streams) / np.linalg.norm(theirs.streams)
    assert distance < 5e-3 and update > 0.1, (distance, update)
    assert np.abs(np.asarray(ours.pre_mix) - theirs.pre_mix).max() < 5e-3
    if topology.mode is not LayerMode.WINDOW:
        assert np.array_equal(np.asarray(ours.selection.entries)[:, : theirs.topk.shape[1]], theirs.topk)
