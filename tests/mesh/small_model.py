"""A checkpoint whose programs compile fast on a mesh: four layers and a draft, every size divisible by eight."""

from __future__ import annotations

from pathlib import Path

from checkpoints.synthesize import synthesize
from tests.acceptance.model import acceptance_config
from tests.mesh.model import DIVISIBLE
from v41jax.config import ModelConfig

_TEXT = {
    **DIVISIBLE,
    "num_hidden_layers": 4,
    # Window only; owner of ratio 2 with the Engram; owner of ratio 1 and a reuse, which are the decoder.
    "compress_ratios": [0, 2, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2],
    "candidate_source_layer_id": 2,
    "engram_layer_ids": [1],
    "num_nextn_predict_layers": 3,
    "dspark_target_layer_ids": [0, 2, 3],
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
}


def small_config() -> ModelConfig:
    """The configuration."""
    return acceptance_config(**_TEXT)


def write_checkpoint(path: Path) -> None:
    """A random checkpoint of it."""
    synthesize(path, small_config(), seed=17, scopes=("text", "draft", "vision"))
