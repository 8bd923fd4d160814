"""The checkpoint of the mesh tests: every layer mode in six layers, and every size divisible by eight."""

from __future__ import annotations

from pathlib import Path

from checkpoints.synthesize import synthesize
from tests.acceptance.model import acceptance_config
from v41jax.config import ModelConfig

DIVISIBLE = {
    "num_attention_heads": 8,
    "o_groups": 8,
    "index_n_heads": 8,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
}
"""Sizes of the text model that eight chips divide."""


LAYERS = {
    "num_hidden_layers": 6,
    # Window only; owner of ratio 2 with the Engram; owner of ratio 1; one that chooses anew among its candidates; a run
    # of two that reuse the choice.
    "compress_ratios": [0, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 3],
    "candidate_source_layer_id": 2,
}
"""Programs of eight devices compile for seconds, and for as long as they have different layers."""


def mesh_config() -> ModelConfig:
    """The configuration."""
    return acceptance_config(**DIVISIBLE, **LAYERS)


def write_checkpoint(path: Path) -> None:
    """A random checkpoint of it."""
    synthesize(path, mesh_config(), seed=13, scopes=("text",))
