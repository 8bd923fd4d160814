"""The checkpoint of the mesh tests: every layer mode in seven layers, and every size divisible by eight."""

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


def mesh_config() -> ModelConfig:
    """The configuration."""
    return acceptance_config(**DIVISIBLE)


def write_checkpoint(path: Path) -> None:
    """A random checkpoint of it."""
    synthesize(path, mesh_config(), seed=13, scopes=("text",))
