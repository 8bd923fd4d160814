"""Named configurations: the released sizes and small models that have every layer mode.

`v4.1-flash` is the release. `v4.1-flash-96e` has its shapes with a quarter of the experts and small hash tables, for
one large accelerator. `bench-small` is for timing on small machines, `tiny` for demonstrations with the real tokenizer,
`pico` and `odd` for tests; `odd` differs from the release in every size that code could take for granted.
"""

from __future__ import annotations

import copy
from typing import Any

from v41jax.config import ConfigError, ModelConfig
from v41jax.engram_primes import set_engram_rows

_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}

_FLASH_TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-20,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "compress_rope_theta": 160000,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
    "num_nextn_predict_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_num_experts_per_tok": 3,
}

_FLASH_VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "rope_theta": 10000,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}

_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "image_token_id": 129264,
    "tie_word_embeddings": False,
    "quantization_config": _QUANTIZATION,
    "text_config": _FLASH_TEXT,
    "vision_config": _FLASH_VISION,
}

_SMALL_YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}

_TWELVE_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 12,
    "compress_ratios": [0] * 2 + [2] * 4 + [1] * 6 + [0] * 3,
    "kv_source_layer_ids": [2, 4, 6],
    "index_source_layer_ids": [2, 4, 6, 8, 10],
    "candidate_source_layer_id": 6,
    "engram_layer_ids": [1, 4],
    "dspark_target_layer_ids": [9, 10, 11],
}
"""Every mode at both ratios: two window layers, three owners, two re-index layers, reuse layers after each."""

_SMALL_VISION: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "patch_size": 4,
    "max_image_tokens": 64,
    "min_pixels": 400,
}

_PICO_TEXT: dict[str, Any] = {
    **_TWELVE_LAYERS,
    "vocab_size": 512,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "o_groups": 4,
    "max_position_embeddings": 4096,
    "rope_scaling": _SMALL_YARN,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 16,
    "candidate_topk_blocks": 6,
    "candidate_block_size": 4,
    "engram_vocab_size": 500,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
    "engram_compressed_vocab_size": 400,
    "dspark_noise_token_id": 511,
    "dspark_markov_rank": 16,
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}

_CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "v4.1-flash": {},
    "v4.1-flash-96e": {"text_config": {"n_routed_experts": 96, "engram_vocab_size": 16000}},
    "bench-small": {
        "root": {"image_token_id": 12000},
        "text_config": {
            **_TWELVE_LAYERS,
            "vocab_size": 12288,
            "hidden_size": 512,
            "moe_intermediate_size": 256,
            "num_attention_heads": 8,
            "head_dim": 128,
            "qk_rope_head_dim": 32,
            "q_lora_rank": 256,
            "o_lora_rank": 128,
            "o_groups": 4,
            "max_position_embeddings": 131072,
            "rope_scaling": _SMALL_YARN | {"original_max_position_embeddings": 8192},
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "index_n_heads": 8,
            "index_head_dim": 64,
            "index_topk": 128,
            "candidate_topk_blocks": 64,
            "engram_vocab_size": 2000,
            "engram_n_heads": 4,
            "engram_head_dim": 64,
            "engram_compressed_vocab_size": 9000,
            "dspark_noise_token_id": 12287,
            "dspark_markov_rank": 32,
            "dspark_n_routed_experts": 4,
            "dspark_num_experts_per_tok": 2,
        },
        "vision_config": _SMALL_VISION,
    },
    "tiny": {
        "text_config": {
            **_PICO_TEXT,
            "vocab_size": 129280,
            "engram_compressed_vocab_size": 99092,
            "dspark_noise_token_id": 128799,
            "max_position_embeddings": 32768,
            "num_hidden_layers": 8,
            "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
            "kv_source_layer_ids": [2, 4],
            "index_source_layer_ids": [2, 4, 6],
            "candidate_source_layer_id": 4,
            "engram_layer_ids": [1, 2],
            "dspark_target_layer_ids": [5, 6, 7],
            "sliding_window": 32,
            "index_topk": 32,
            "candidate_topk_blocks": 16,
        },
        "vision_config": _SMALL_VISION,
    },
    "pico": {"root": {"image_token_id": 500}, "text_config": _PICO_TEXT, "vision_config": _SMALL_VISION},
    "odd": {
        "root": {"image_token_id": 300, "pad_token_id": 3},
        "text_config": {
            "vocab_size": 331,
            "hidden_size": 160,
            "moe_intermediate_size": 96,
            "num_hidden_layers": 9,
            "num_attention_heads": 6,
            "head_dim": 96,
            "qk_rope_head_dim": 24,
            "q_lora_rank": 96,
            "o_lora_rank": 48,
            "o_groups": 2,
            "swiglu_limit": 7.0,
            "max_position_embeddings": 2048,
            "rope_theta": 5000,
            "compress_rope_theta": 40000,
            "rope_scaling": _SMALL_YARN | {"factor": 8, "original_max_position_embeddings": 96},
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 2.25,
            "sliding_window": 11,
            "compress_ratios": [0, 1, 1, 2, 2, 2, 1, 1, 1, 0, 0],
            "kv_source_layer_ids": [1, 3, 6],
            "index_source_layer_ids": [1, 2, 3, 5, 6, 7],
            "index_n_heads": 3,
            "index_head_dim": 64,
            "index_topk": 10,
            "candidate_source_layer_id": 6,
            "candidate_topk_blocks": 5,
            "candidate_block_size": 3,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 5,
            "hc_eps": 1e-5,
            "engram_layer_ids": [0, 6],
            "engram_max_ngram_size": 3,
            "engram_vocab_size": 211,
            "engram_n_heads": 3,
            "engram_head_dim": 64,
            "engram_pad_token_id": 3,
            "engram_compressed_vocab_size": 251,
            "num_nextn_predict_layers": 2,
            "dspark_block_size": 4,
            "dspark_noise_token_id": 330,
            "dspark_target_layer_ids": [4, 8],
            "dspark_markov_rank": 24,
            "dspark_n_routed_experts": 5,
            "dspark_num_experts_per_tok": 1,
            "gate_temp": 1.25,
            "engram_seed": 3,
        },
        "vision_config": {
            **_SMALL_VISION,
            "num_hidden_layers": 3,
            "hidden_size": 48,
            "num_attention_heads": 3,
            "intermediate_size": 80,
            "patch_size": 6,
            "rope_theta": 3000,
            "downsample_ratio": 2,
            "max_image_tokens": 40,
            "max_wh_ratio": 20.0,
        },
    },
}

PRESETS = tuple(_CHANGES)
"""Names `preset` accepts."""


def preset_dict(name: str) -> dict[str, Any]:
    """The nested released form of a preset, a fresh copy; table rows come from the prime walk.

    Raises:
      ConfigError: unknown name.
    """
    if name not in _CHANGES:
        raise ConfigError([f"preset {name!r} does not exist; choose from {', '.join(PRESETS)}"])
    root = copy.deepcopy(_FLASH)
    changes = copy.deepcopy(_CHANGES[name])
    root.update(changes.get("root", {}))
    for section in ("text_config", "vision_config"):
        root[section].update(changes.get(section, {}))
    text = root["text_config"]
    set_engram_rows(text)
    return root


def preset(name: str) -> ModelConfig:
    """The validated config of a preset; raises as `preset_dict`."""
    return ModelConfig.from_dict(preset_dict(name))
