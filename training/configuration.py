"""Sizes of the miniature, and of the toy that tests train."""

from __future__ import annotations

from typing import Any

from v41jax.config import ModelConfig
from v41jax.engram_primes import set_engram_rows
from v41jax.presets import preset_dict

_TEXT: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 8,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4],
    "index_source_layer_ids": [2, 4, 6],
    "candidate_source_layer_id": 4,
    "engram_layer_ids": [1, 2],
    "dspark_target_layer_ids": [5, 6, 7],
    "num_attention_heads": 4,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 96,
    "o_lora_rank": 64,
    "o_groups": 4,
    "max_position_embeddings": 4096,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 1024,
    },
    "compress_rope_theta": 40000,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "sliding_window": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "candidate_topk_blocks": 24,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 8,
    "engram_vocab_size": 2800,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}

_VISION: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 4,
    "downsample_ratio": 2,
    "max_image_tokens": 64,
    "min_pixels": 400,
}

_TOY: dict[str, Any] = {
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "index_n_heads": 2,
    "index_topk": 12,
    "candidate_topk_blocks": 3,
    "hc_mult": 2,
    "engram_vocab_size": 97,
    "dspark_markov_rank": 8,
}
"""What differs from `_TEXT` in the toy."""


def configuration(
    vocabulary: int, compressed: int, *, image_token: int, noise_token: int, toy: bool = False
) -> ModelConfig:
    """The validated configuration.

    Args:
      vocabulary: tokens of the tokenizer.
      compressed: compressed ids of its token map.
      image_token: id of the image placeholder.
      noise_token: id that the draft embeds at unknown positions.
      toy: the small one for tests.
    """
    root = preset_dict("tiny")
    text = root["text_config"]
    text.update(_TEXT)
    if toy:
        text.update(_TOY)
    text.update(vocab_size=vocabulary, engram_compressed_vocab_size=compressed, dspark_noise_token_id=noise_token)
    set_engram_rows(text)
    root["vision_config"].update(_VISION)
    root["image_token_id"] = image_token
    return ModelConfig.from_dict(root)
