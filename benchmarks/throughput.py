"""Prefill and decode rates of the engine, and of mlx-vlm on the same checkpoint when it is installed.

    python -m benchmarks.throughput --model DIR [--dtype bfloat16] [--prompt-tokens N] [--new-tokens N] [--batches 1,8]

Prints one JSON line a measurement. Rates are the best of `--repeats` runs after one that compiles; decode counts the
tokens after the first of every request. `pip install mlx-vlm` adds the comparison: the same prompts, greedy, weights
dequantized from the same bytes, its own cache. It always runs in float32, the only type in which its CPU backend
multiplies experts.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Rates:
    """Tokens per second of one batch."""

    prefill: float
    decode: float


def prompts_of(config: ModelConfig, batch: int, length: int, seed: int) -> np.ndarray:
    """[batch, length] int32 random text ids."""
    top = min(config.text.vocab_size, config.image_token_id)
    return np.random.default_rng(seed).integers(3, top, (batch, length), dtype=np.int32)


def engine_rates(engine: Any, prompts: np.ndarray, new_tokens: int) -> Rates:
    """One run of the engine over prompts it has not seen."""
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    requests = [engine.prompt(prompt.tolist(), sampling) for prompt in prompts]
    results = engine.generate(requests)
    first = max(result.time_to_first_token_s for result in results)
    last = max(result.time_s for result in results)
    return Rates(prompts.size / first, len(prompts) * (new_tokens - 1) / (last - first))


def mlx_rates(model: Any, prompts: np.ndarray, new_tokens: int) -> Rates:
    """One run of mlx-vlm's language model: one prefill call, then one call a token."""
    import mlx.core as mx

    cache = model.language_model.make_cache()
    began = time.perf_counter()
    logits = model.language_model(mx.array(prompts), cache=cache).logits[:, -1, :]
    tokens = mx.argmax(logits, axis=-1)
    mx.eval(tokens)
    first = time.perf_counter()
    for _ in range(new_tokens - 1):
        logits = model.language_model(tokens[:, None], cache=cache).logits[:, -1, :]
        tokens = mx.argmax(logits, axis=-1)
        mx.eval(tokens)
    last = time.perf_counter()
    return Rates(prompts.size / (first - began), len(prompts) * (new_tokens - 1) / (last - first))


def load_mlx(directory: Path) -> Any:
    """The checkpoint through mlx-vlm, on the CPU, every weight widened to float32."""
    import mlx.core as mx
    from mlx_vlm.utils import load_model

    mx.set_default_device(mx.cpu)
    model = load_model(directory)
    model.set_dtype(mx.float32)
    return model


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--skip-mlx", action="store_true")
    arguments = parser.parse_args()
    batches = [int(size) for size in arguments.batches.split(",")]

    from v41jax.engine import Engine

    length = arguments.prompt_tokens + arguments.new_tokens
    page = 128
    config = EngineConfig(
        dtype=arguments.dtype,
        index_cache_dtype="fp4",
        encoder_swa_bounded_replay=False,
        decoder_swa_bounded_replay=False,
        max_num_seqs=max(batches),
        max_model_len=-(-length // page) * page,
        max_num_batched_tokens=max(max(batches) * arguments.prompt_tokens, 2 * page),
        decode_buckets=tuple(sorted(set(batches))),
        num_pages=2 * max(batches) * -(-length // page),
        enable_prefix_caching=False,
    )
    header = provenance()
    with Engine.from_checkpoint(arguments.model, config, warm_up=False) as engine:
        model_config = engine.core.runner.setup.config

        def report(system: str, dtype: str, batch: int, measure: Any) -> None:
            runs = [
                measure(prompts_of(model_config, batch, arguments.prompt_tokens, seed))
                for seed in range(arguments.repeats + 1)
            ][1:]
            record = {
                "benchmark": "throughput",
                "system": system,
                "batch": batch,
                "prompt_tokens": arguments.prompt_tokens,
                "new_tokens": arguments.new_tokens,
                "dtype": dtype,
                "prefill_tokens_per_s": round(max(run.prefill for run in runs), 1),
                "decode_tokens_per_s": round(max(run.decode for run in runs), 2),
                **header,
            }
            print(json.dumps(record), flush=True)

        for batch in batches:
            report(
                "v41jax", arguments.dtype, batch, lambda prompts: engine_rates(engine, prompts, arguments.new_tokens)
            )
        if arguments.skip_mlx or importlib.util.find_spec("mlx_vlm") is None:
            return
        model = load_mlx(arguments.model)
        name = f"mlx-vlm {importlib.metadata.version('mlx-vlm')}"
        for batch in batches:
            report(name, "float32", batch, lambda prompts: mlx_rates(model, prompts, arguments.new_tokens))


if __name__ == "__main__":
    main()
