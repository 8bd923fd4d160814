"""Host time of one engine step on a tiny model: `python -m benchmarks.engine_overhead [--batches 1,8,32] [--profile]`.

One JSON line a batch size and phase, milliseconds a step: `plan` (scheduling and the step's arrays), `lookup` (Engram
rows), `dispatch` (handing the step to the device), `wait` (blocked on the step before), `finish` (results, outputs and
text), and `host`, all of them but `wait`. While the device runs a step the host does the next one's `plan`; what is
not hidden is a step's time beyond `wait`. `--profile` adds the functions that the host spends its time in.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.provenance import provenance
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import Phase
from scheduler.sequence import SamplingParams
from v41jax.engine import Engine
from v41jax.engine_requests import Prompt

MODEL = Path(__file__).resolve().parent.parent / "tests" / "golden" / "five-layer"
PAGE = 32
PARTS = ("plan", "lookup", "dispatch", "wait", "finish")


def measure(engine: Engine, batch: int, steps: int, prompt: int) -> dict[Phase, list[dict[str, float]]]:
    """Seconds of each part of every step, by phase; of decode steps only those of a full batch."""
    rng = np.random.default_rng(0)
    vocabulary = engine.core.runner.setup.config.text.vocab_size
    sampling = SamplingParams(max_tokens=steps, ignore_eos=True)
    for _ in range(batch):
        engine.submit(Prompt(tuple(rng.integers(3, vocabulary - 20, prompt).tolist()), sampling))
    found: dict[Phase, list[dict[str, float]]] = {Phase.PREFILL: [], Phase.DECODE: []}
    while engine.core.has_work:
        timed = len(engine.core.step_times) and engine.core.step_times[-1]
        began = time.perf_counter()
        engine.step()
        total = time.perf_counter() - began
        times = engine.core.step_times[-1]
        if times is timed or (times.phase is Phase.DECODE and times.rows != batch):
            continue
        parts = {name: getattr(times, name) for name in ("plan", "lookup", "dispatch", "wait")}
        found[times.phase].append(parts | {"finish": total - sum(parts.values()) - times.vision, "step": total})
    return found


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians in milliseconds, and the 90th percentile of the host's share."""
    result = {f"{name}_ms": 1e3 * statistics.median(step[name] for step in steps) for name in (*PARTS, "step")}
    host = sorted(1e3 * (step["step"] - step["wait"]) for step in steps)
    result["host_ms"] = statistics.median(host)
    result["host_p90_ms"] = host[int(0.9 * (len(host) - 1))]
    return {name: round(value, 4) for name, value in result.items()}


def hottest(profile: cProfile.Profile, count: int = 12) -> list[dict[str, Any]]:
    """Functions by their own time."""
    table = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    order = sorted(table.items(), key=lambda item: -item[1][2])[:count]
    return [
        {"function": f"{Path(file).name}:{line} {name}", "calls": calls, "seconds": round(own, 4)}
        for (file, line, name), (_, calls, own, _, _) in order
    ]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Prints the lines and returns them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint directory")
    parser.add_argument("--batches", default="1,8,32", help="running requests, separated by commas")
    parser.add_argument("--steps", type=int, default=200, help="decode steps")
    parser.add_argument("--prompt", type=int, default=40, help="prompt tokens of each request")
    parser.add_argument("--profile", action="store_true", help="also print where the host's time goes")
    options = parser.parse_args(arguments)
    batches = [int(batch) for batch in options.batches.split(",")]
    length = -(-(options.prompt + options.steps + 1) // PAGE) * PAGE
    config = EngineConfig(
        kv_cache_block_size=PAGE,
        max_num_batched_tokens=max(2 * PAGE, options.prompt),
        max_num_seqs=max(batches),
        max_model_len=length,
        num_pages=(length // PAGE) * max(batches),
        decode_buckets=tuple(sorted(set(batches))),
        enable_prefix_caching=False,
    )
    records = []
    origin = provenance()
    with Engine.from_checkpoint(options.model, config, warm_up=False) as engine:
        for batch in batches:
            measure(engine, batch, 4, options.prompt)  # compiles
            profile = cProfile.Profile() if options.profile else None
            if profile is not None:
                profile.enable()
            found = measure(engine, batch, options.steps, options.prompt)
            if profile is not None:
                profile.disable()
            for phase, steps in found.items():
                record = {
                    "benchmark": "engine_overhead",
                    "model": options.model.name,
                    "phase": phase.value,
                    "batch": batch,
                    "steps": len(steps),
                    **summary(steps),
                    **({} if profile is None else {"profile": hottest(profile)}),
                    **origin,
                }
                records.append(record)
                print(json.dumps(record), flush=True)
    return records


if __name__ == "__main__":
    main()
