"""A toy of the miniature with its own tokenizer, exported once."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from training.configuration import configuration
from training.data import NOISE, train_tokenizer
from training.export import export
from training.hashing import HashTables, hash_tables
from training.weights import Masters, initial_masters, is_state
from v41jax.config import ModelConfig
from v41jax.layers.rope import RopeTable, build_table, plain_frequencies, yarn_frequencies
from v41jax.protocol.tokens import IMAGE
from v41jax.token_map import build_token_map

LENGTH = 64
TEXT = (
    "The window holds the last rows of every layer. The page holds what the window has let go, and the index finds it."
)


@dataclasses.dataclass(frozen=True)
class Toy:
    """Everything a test of the forwards needs; `directory` is the exported checkpoint."""

    config: ModelConfig
    masters: Masters
    tables: HashTables
    token_map: np.ndarray
    plain: RopeTable
    yarn: RopeTable
    directory: Path
    token_ids: np.ndarray


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT], size=320)


@pytest.fixture(scope="session")
def toy(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    token_map = build_token_map(tokenizer)
    config = configuration(
        tokenizer.get_vocab_size(),
        int(token_map.max()) + 1,
        image_token=tokenizer.token_to_id(IMAGE),
        noise_token=tokenizer.token_to_id(NOISE),
        toy=True,
    )
    random = np.random.default_rng(3)
    masters = initial_masters(config, ("text", "draft"), 5)
    for name, master in masters.items():
        if is_state(name) or "sink" in name or "hc_" in name or "norm" in name or "confidence" in name:
            masters[name] = master + jnp.asarray(random.normal(0, 0.1, master.shape), jnp.float32)
    for name in masters:
        if name.endswith("bias_vl"):
            masters[name] = masters[name.removesuffix("_vl")]
    place = tmp_path_factory.mktemp("toy")
    tokenizer.save(str(place / "tokenizer.json"))
    export(place / "nano", config, masters, place / "tokenizer.json")
    text = config.text
    tables = [
        RopeTable(*(jnp.asarray(part) for part in build_table(frequencies, 2 * LENGTH)))
        for frequencies in (plain_frequencies(text.rope_theta, text.qk_rope_head_dim), yarn_frequencies(text))
    ]
    ids = random.integers(0, text.vocab_size, (2, LENGTH)).astype(np.int32)
    return Toy(config, masters, hash_tables(config, token_map), token_map, *tables, place / "nano", ids)
