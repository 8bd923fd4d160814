"""Decode on an NVIDIA GPU: layers of a run without a loop, and mixes that start when no others wait."""

import jax
import numpy as np
import pytest

from checkpoints.synthesize import synthesize
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax import model
from v41jax.config import ModelConfig
from v41jax.engine import Engine
from v41jax.parameters import plan_runs
from v41jax.presets import preset_dict

ONE_RUN = {
    "num_hidden_layers": 6,
    "compress_ratios": [0, 2, 2, 2, 2, 2, 0, 0, 0],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1],
    "candidate_source_layer_id": -1,
    "candidate_topk_blocks": 0,
    "candidate_block_size": 0,
    "engram_layer_ids": [],
    "engram_num_embeddings": [],
    "dspark_target_layer_ids": [3, 4, 5],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    root = preset_dict("pico")
    root["text_config"] |= ONE_RUN
    config = ModelConfig.from_dict(root)
    assert max(len(run.layers) for run in plan_runs(config)) == 4
    path = tmp_path_factory.mktemp("unrolled") / "model"
    synthesize(path, config, seed=7, scopes=("text",))
    return path


def tokens(checkpoint):
    options = EngineConfig(
        dtype="float32",
        activation_quantization=False,
        max_num_seqs=1,
        max_model_len=64,
        max_num_batched_tokens=64,
        kv_cache_block_size=32,
        num_pages=8,
        vision="off",
    )
    with Engine.from_checkpoint(checkpoint, options, warm_up=False) as engine:
        prompt = np.random.default_rng(0).integers(3, 400, 9).tolist()
        [reply] = engine.generate([engine.prompt(prompt, SamplingParams(max_tokens=6, ignore_eos=True))])
    return list(reply.tokens)


def test_layers_without_a_loop_give_the_tokens_of_the_loop(checkpoint, monkeypatch):
    loops = []
    scan = jax.lax.scan

    def watched(*args, unroll=1, **kwargs):
        loops.append(bool(unroll is True))
        return scan(*args, unroll=unroll, **kwargs)

    monkeypatch.setattr(model.jax.lax, "scan", watched)
    looped = tokens(checkpoint)
    assert loops and not any(loops)
    jax.clear_caches()
    monkeypatch.setattr(model, "unrolls_layers", lambda step: step.phase == "decode")
    loops.clear()
    assert tokens(checkpoint) == looped
    assert any(loops) and not all(loops)


def test_mixes_wait_for_rows_of_their_own_sublayer(checkpoint, monkeypatch):
    waits = []
    mixes = model.mixes

    def watched(*args, after=None):
        waits.append(None if after is None else after.rounded.shape[-1])
        return mixes(*args, after=after)

    monkeypatch.setattr(model, "mixes", watched)
    jax.clear_caches()
    tokens(checkpoint)
    text = ModelConfig.from_dict(preset_dict("pico")).text
    assert set(waits[0::2]) == {text.hidden_size} and set(waits[1::2]) == {text.moe_intermediate_size}
