"""Serves a few requests through the engine on virtual devices; to be run in a process of its own.

`python -m tests.mesh.serving CHECKPOINT MESH...`, a mesh as `MODEL` or `MODEL:experts`; prints one JSON object a mesh:
its tokens, cached tokens, and bytes of the weights on one device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax.engine import Engine

PREFIX = 64


def prompts(vocabulary: int) -> list[list[int]]:
    """Four prompts, three of them with a common prefix of two pages."""
    random = np.random.default_rng(3)
    first = random.integers(3, vocabulary - 10, 90).tolist()
    hits = [first[:PREFIX] + first[5:30], first[:PREFIX] + first[8:20]]
    return [first, random.integers(3, vocabulary - 10, 37).tolist(), *hits]


def options(name: str) -> EngineConfig:
    """Options of one mesh."""
    model, _, experts = name.partition(":")
    return EngineConfig(
        dtype="float32",
        activation_quantization=False,
        kv_cache_block_size=32,
        max_num_batched_tokens=128,
        max_num_seqs=4,
        max_model_len=160,
        num_pages=24,
        decode_buckets=(4,),
        mesh={"data": 1, "model": int(model)},
        enable_expert_parallel=bool(experts),
        vision="off",
    )


def serve(engine: Engine) -> dict[str, object]:
    """Runs the prompts, two and two: both steps of prefill finish two requests, which is one program."""
    vocabulary = engine.core.runner.setup.config.text.vocab_size
    first, second, *hits = prompts(vocabulary)
    greedy = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=5, temperature=1.0, seed=9, ignore_eos=True, logit_bias=((7, 1.0),))
    results = engine.generate([engine.prompt(first, greedy), engine.prompt(second, drawn)])
    results += engine.generate([engine.prompt(hit, greedy) for hit in hits])
    return {
        "tokens": [list(result.tokens) for result in results],
        "cached": [result.cached_tokens for result in results],
        "weights": engine.budget.weight_bytes,
        "summary": {key: engine.summary().get(key) for key in ("mesh", "experts")},
    }


def main() -> None:
    checkpoint = Path(sys.argv[1])
    for name in sys.argv[2:]:
        with Engine.from_checkpoint(checkpoint, options(name), warm_up=False) as engine:
            print(json.dumps(serve(engine)), flush=True)


if __name__ == "__main__":
    main()
