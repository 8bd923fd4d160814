"""Small Engram configurations for hashing tests."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from tests.helpers import golden
from v41jax.config import ModelConfig


def with_text(config: ModelConfig, **changes: object) -> ModelConfig:
    """The configuration with some text fields replaced, unvalidated."""
    return dataclasses.replace(config, text=dataclasses.replace(config.text, **changes))


def pico_config() -> ModelConfig:
    """The configuration of the golden checkpoint `pico`."""
    return ModelConfig.from_file(golden.directory("pico"))


def released_engram_config() -> ModelConfig:
    """The released Engram constants (Engram specification, "Constants") on an otherwise tiny configuration."""
    return with_text(
        pico_config(),
        vocab_size=129280,
        engram_layer_ids=(1, 14),
        engram_max_ngram_size=4,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_vocab_size=16_000_000,
        engram_num_embeddings=(384_006_168, 384_016_682),
        engram_compressed_vocab_size=99_092,
        engram_pad_token_id=2,
    )


def worked_example_config() -> ModelConfig:
    """The configuration of the Engram specification, "Small worked example"."""
    return with_text(
        pico_config(),
        vocab_size=32,
        engram_layer_ids=(1, 3),
        engram_max_ngram_size=4,
        engram_n_heads=2,
        engram_vocab_size=50,
        engram_num_embeddings=(384, 552),
        engram_compressed_vocab_size=32,
        engram_pad_token_id=2,
    )


def identity_map(size: int) -> NDArray[np.int32]:
    """A token map that changes nothing."""
    return np.arange(size, dtype=np.int32)
