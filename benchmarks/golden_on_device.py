"""The golden checkpoints on the device that is there: logits against the recorded ones and tokens of the engine.

    python -m benchmarks.golden_on_device [--kernels auto,xla]

One JSON line a run. float32 without activation quantization is held against the recorded float32 logits (differences
are the order of sums, and TF32 where a backend uses it); bfloat16 from stored codes shows that packed weights, packed
pools and the device's kernels run and stay finite, with the share of positions whose best token is the recorded one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.provenance import provenance
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax.engine import Engine
from v41jax.full_forward import full_forward, load_model
from v41jax.precision import Precision

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"


def compare_logits(name: str, kernels: str) -> list[dict[str, object]]:
    """Logits of the 100-token golden prompt in two precisions."""
    expected = np.load(GOLDEN / name / "expected.npz")
    tokens = expected["prompt4"]
    records: list[dict[str, object]] = []
    for mode, precision, form, packed in (
        ("noquant", Precision(jnp.float32, False), "dequantized", False),
        ("quant", Precision(jnp.bfloat16, True), "stored", True),
    ):
        began = time.perf_counter()
        recorded = expected[f"{mode}.float32.logits4"]
        with load_model(GOLDEN / name, precision, form=form, kernels=kernels, packed=packed) as model:
            found = full_forward(model.params, tokens, model.setup, model.lookup)[-len(recorded) :]
        same = float((found.argmax(1) == recorded.argmax(1)).mean())
        records.append(
            {
                "check": "logits",
                "checkpoint": name,
                "mode": mode,
                "dtype": jnp.dtype(precision.activation_dtype).name,
                "weights": form,
                "kernels": kernels,
                "largest_difference": float(np.abs(found - recorded).max()),
                "same_best_token": round(same, 4),
                "seconds": round(time.perf_counter() - began, 2),
            }
        )
    return records


def engine_tokens(name: str, kernels: str) -> dict[str, object]:
    """Tokens of a batch through the engine, alone and together."""
    expected = np.load(GOLDEN / name / "expected.npz")
    config = EngineConfig(
        kv_cache_block_size=32,
        kv_cache_dtype="fp4",
        max_num_batched_tokens=256,
        max_num_seqs=4,
        max_model_len=512,
        decode_buckets=(4,),
        num_pages=64,
        kernels=kernels,
    )
    began = time.perf_counter()
    with Engine.from_checkpoint(GOLDEN / name, config, warm_up=False, weights="stored") as engine:
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        prompts = [engine.prompt(expected[f"prompt{index}"].tolist(), sampling) for index in (2, 3, 4)]
        together = [result.tokens for result in engine.generate(prompts)]
        alone = [engine.generate([prompt])[0].tokens for prompt in prompts]
        choices = engine.summary().get("kernels")
    return {
        "check": "engine",
        "checkpoint": name,
        "kernels": kernels,
        "kernel_choices": choices,
        "same_tokens_alone_and_together": sum(a == b for a, b in zip(together, alone, strict=True)),
        "of": len(prompts),
        "seconds": round(time.perf_counter() - began, 2),
    }


def main() -> None:
    """Runs every check and prints its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="auto,xla")
    header = provenance()
    for kernels in parser.parse_args().kernels.split(","):
        for name in ("five-layer", "pico"):
            for record in compare_logits(name, kernels):
                print(json.dumps({**record, **header}), flush=True)
        print(json.dumps({**engine_tokens("five-layer", kernels), **header}), flush=True)


if __name__ == "__main__":
    main()
