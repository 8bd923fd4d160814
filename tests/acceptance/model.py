"""The checkpoint of the acceptance scenarios: every layer mode in seven layers, one page to a window."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints.synthesize import synthesize
from tests.helpers import golden
from v41jax.config import ModelConfig

PAGE = WINDOW = 32
BOUNDARY = 3
"""The first decoder layer."""
VOCABULARY = 256

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "head_dim": 64,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    # Window only; owner with the Engram and a re-index at ratio 2; owner, re-index and two reuses of the decoder.
    "compress_ratios": [0, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [1, BOUNDARY],
    "index_source_layer_ids": [1, 2, BOUNDARY, 4],
    "index_n_heads": 2,
    "index_topk": 16,
    "candidate_source_layer_id": BOUNDARY,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 4,
    "engram_compressed_vocab_size": 200,
    "num_nextn_predict_layers": 0,
    "dspark_noise_token_id": 255,
}
"""Selections hold 16 entries and candidates 24, so that contexts of more than 32 tokens are pruned at both levels."""


DRAFT = {
    "num_nextn_predict_layers": 3,
    "compress_ratios": [*_TEXT["compress_ratios"], 0, 0, 0],
    "dspark_target_layer_ids": [4, 5, 6],
}
"""Values of `text_config` that give the model a draft."""

SHALLOW = DRAFT | {
    "num_hidden_layers": 3,
    # Owner with the Engram at ratio 2; owner of the decoder; one that selects anew among its candidates.
    "compress_ratios": [2, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [0, 1],
    "index_source_layer_ids": [0, 1, 2],
    "candidate_source_layer_id": 1,
    "engram_layer_ids": [0],
    "dspark_target_layer_ids": [1, 2],
}
"""The same with a draft and every kind of pool in three layers: for engines that are one test's, whose programs take
most of its time to compile."""


def acceptance_config(**text: Any) -> ModelConfig:
    """The configuration; other values of `text_config` by name."""
    root = json.loads((golden.directory("five-layer") / "config.json").read_text())
    root["image_token_id"] = 250
    root["text_config"] |= _TEXT | text
    return ModelConfig.from_dict(root)


def write_checkpoint(path: Path, **text: Any) -> None:
    """A random checkpoint of it, with its draft if it has one."""
    config = acceptance_config(**text)
    scopes = ("text", "draft") if config.text.num_nextn_predict_layers else ("text",)
    synthesize(path, config, seed=11, scopes=scopes)
