"""Loaded models for tests: the golden checkpoints and synthesized ones, each opened once per process."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path

import jax.numpy as jnp

from checkpoints.load import Checkpoint
from checkpoints.synthesize import synthesize
from tests.helpers import golden
from v41jax.config import ModelConfig
from v41jax.full_forward import LoadedModel, load_model
from v41jax.precision import Precision
from v41jax.presets import preset, preset_dict
from v41jax.reference.model import ReferenceModel

MAX_LEN = 512

_open = contextlib.ExitStack()


def encoder_only() -> ModelConfig:
    """Five layers of windows and ratio 2: no decoder, no candidates, no Engram, one REINDEX layer, three streams."""
    root = preset_dict("pico")
    root["text_config"] |= {
        "num_hidden_layers": 5,
        "compress_ratios": [0, 2, 2, 2, 0, 0, 0, 0],
        "kv_source_layer_ids": [1],
        "index_source_layer_ids": [1, 3],
        "candidate_source_layer_id": -1,
        "candidate_topk_blocks": 0,
        "candidate_block_size": 0,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "dspark_target_layer_ids": [2, 3, 4],
        "hc_mult": 3,
        "sliding_window": 5,
        "index_topk": 7,
        "swiglu_limit": 0.0,
    }
    return ModelConfig.from_dict(root)


@functools.cache
def directory(name: str) -> Path:
    """A golden checkpoint by its name, else a preset or `encoder_only` synthesized into a temporary directory."""
    if name in golden.CHECKPOINTS:
        return golden.directory(name)
    path = Path(_open.enter_context(tempfile.TemporaryDirectory())) / name
    config = encoder_only() if name == "encoder-only" else preset(name)
    synthesize(path, config, seed=7, scopes=("text",))
    return path


@functools.cache
def model(
    name: str, dtype: str = "float32", quantized: bool = False, form: str = "dequantized", **geometry: object
) -> LoadedModel:
    """One checkpoint in one precision."""
    precision = Precision(jnp.dtype(dtype), quantized)
    return _open.enter_context(load_model(directory(name), precision, max_model_len=MAX_LEN, form=form, **geometry))


@functools.cache
def reference(name: str, dtype: str = "float32", quantized: bool = False, index_format: str = "fp4") -> ReferenceModel:
    """The float64 model of the same checkpoint with the rounding points of `dtype`."""
    checkpoint = _open.enter_context(Checkpoint.open(directory(name)))
    return _open.enter_context(
        ReferenceModel(
            checkpoint,
            rounding="bfloat16" if dtype == "bfloat16" else "none",
            activation_quantization=quantized,
            index_format=index_format,
        )
    )
