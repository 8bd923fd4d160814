"""A model for bounded-replay tests: a short encoder, a decoder with a re-indexing layer and a run of reusing ones."""

from __future__ import annotations

import json
from pathlib import Path

from checkpoints.synthesize import synthesize
from tests.helpers import golden
from v41jax.config import ModelConfig

PAGE = 32
WINDOW = 12
IMAGE = 250
BOUNDARY = 3
"""The first decoder layer."""

_TEXT = {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "head_dim": 64,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    # Window only, the ratio-2 owner with the Engram, a reuse; owner, re-index, three reuses of the decoder.
    "compress_ratios": [0, 2, 2, 1, 1, 1, 1, 1],
    "kv_source_layer_ids": [1, BOUNDARY],
    "index_source_layer_ids": [1, BOUNDARY, 4],
    "index_n_heads": 2,
    "index_topk": 8,
    "candidate_source_layer_id": BOUNDARY,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 8,
    "engram_compressed_vocab_size": 200,
    "num_nextn_predict_layers": 0,
    "dspark_noise_token_id": 255,
}


SHORT = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 1, 1, 1],
    "kv_source_layer_ids": [1],
    "index_source_layer_ids": [1],
    "candidate_source_layer_id": -1,
    "engram_layer_ids": [0],
    "dspark_target_layer_ids": [1, 2, 3],
}
"""Changes that leave four layers, all of the decoder tapped by the draft."""


def replay_config(**changes) -> ModelConfig:
    """The configuration, with changes of its text part."""
    root = json.loads((golden.directory("five-layer") / "config.json").read_text())
    root["image_token_id"] = IMAGE
    root["text_config"] |= _TEXT | changes
    return ModelConfig.from_dict(root)


def write_checkpoint(path: Path, **changes) -> None:
    """A random checkpoint of it."""
    synthesize(path, replay_config(**changes), seed=5, scopes=("text",))
