"""Sizes the pools of engines on virtual devices that have little memory; to be run in a process of its own.

`python -m tests.mesh.budgets CHECKPOINT` prints one JSON object for each of `CASES`: the budget, and the bytes that lie
on one device afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import jax

from scheduler.runtime_config import EngineConfig
from v41jax import memory_budget
from v41jax.engine import Engine

MEMORY = 1 << 30
"""Of a device, in bytes."""

SMALL = EngineConfig(
    kv_cache_block_size=32,
    max_num_batched_tokens=256,
    max_num_seqs=8,
    max_model_len=512,
)
DRAFTS = {"speculative_method": "dspark", "num_speculative_tokens": 3}
CASES: dict[str, EngineConfig] = {
    "one device": dataclasses.replace(SMALL, engram_tables="device", **DRAFTS),
    "whole experts": dataclasses.replace(
        SMALL,
        mesh={"data": 2, "model": 2},
        enable_expert_parallel=True,
        engram_tables="device",
        dtype="float32",
        activation_quantization=False,
        **DRAFTS,
    ),
    "packed with images of state": dataclasses.replace(
        SMALL,
        mesh={"data": 4, "model": 1},
        max_num_batched_tokens=512,
        encoder_swa_bounded_replay=False,
        kv_cache_dtype="fp4",
        index_cache_dtype="fp4",
        state_checkpoint_interval_tokens=64,
        vision="off",
    ),
}
"""Options that change what lies on a device."""


def on_one_device(tree: object) -> int:
    """Bytes of arrays on the first device."""
    first = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards if shard.device == first]
    return sum(shard.data.nbytes for shard in shards)


def main() -> None:
    memory_budget.device_memory_bytes = lambda: MEMORY
    memory_budget.CPU_POOL_BYTES = MEMORY
    for options in CASES.values():
        with Engine.from_checkpoint(Path(sys.argv[1]), options, warm_up=False, weights="stored") as engine:
            runner = engine.core.runner
            held = {"pools": runner.pools, "images": runner.images, "adjustments": runner._adjustments}
            found = {name: on_one_device(tree) for name, tree in held.items()}
            print(json.dumps(found | {"budget": dataclasses.asdict(engine.budget)}), flush=True)


if __name__ == "__main__":
    main()
