"""Host time of planning one step: `python benchmarks/scheduler_planning.py [--requests 256]`.

Prints JSON lines. `schedule` is the planning the runtime is judged by (budget: 2 ms for 256 running requests on two
cores); `build` makes the step's arrays, `postprocess` takes in its tokens. No model runs: tokens are constant.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scheduler.batch_builder import build_batch_step
from scheduler.buckets import Buckets
from scheduler.model_view import ModelView
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import Phase, StepResult
from scheduler.scheduler import Scheduler
from scheduler.sequence import SamplingParams, Sequence

FLASH = ModelView(
    layers=40,
    owners=((2, 2), (8, 2), (14, 2), (20, 1)),
    layer_ratios=(),
    window_size=128,
    head_dim=512,
    index_dim=128,
    index_topk=512,
    history_size=3,
    engram_layers=(1, 14),
    image_token_id=129264,
    eos_token_ids=(1,),
    max_position=1_048_576,
    num_attention_heads=64,
    index_n_heads=64,
    o_groups=8,
    moe_intermediate_size=2304,
    n_routed_experts=384,
)
MODEL_LEN = 65_536
BUDGET_MS = 2.0


def measure(requests: int, steps: int, deferred: bool, prompt: int) -> dict[str, list[float]]:
    """Milliseconds of each part for every decode step of a full batch."""
    config = EngineConfig(max_num_seqs=requests, max_model_len=MODEL_LEN)
    geometry = config.geometry(FLASH)
    pages = requests * (geometry.pages_for(prompt + 2 * steps) + 1)
    scheduler = Scheduler(config, FLASH, geometry, pages, requests, deferred=deferred)
    buckets = Buckets.default(config, geometry, pages, MODEL_LEN)
    token_map = np.arange(129280, dtype=np.int32) % 99092
    rng = np.random.default_rng(0)
    for request_id in range(requests):
        ids = rng.integers(2, 129000, prompt)
        scheduler.add(Sequence(request_id, ids, SamplingParams(max_tokens=2 * steps, ignore_eos=True)))
    times: dict[str, list[float]] = {"schedule": [], "build": [], "postprocess": []}
    previous = None
    while len(times["postprocess"]) < steps:
        marks = [time.perf_counter()]
        batch = scheduler.schedule()
        marks.append(time.perf_counter())
        assert batch is not None
        build_batch_step(batch, geometry, buckets, lambda ids: token_map[ids], num_pages=pages, num_slots=requests)
        marks.append(time.perf_counter())
        result = StepResult(np.full(len(batch.output_requests), 5))
        done = previous if deferred else (batch, result)
        previous = (batch, result)
        if done is not None:
            scheduler.postprocess(*done)
        marks.append(time.perf_counter())
        if batch.phase is Phase.DECODE and batch.num_requests == requests:
            for name, begin, end in zip(times, marks, marks[1:]):
                times[name].append(1e3 * (end - begin))
    return times


def main() -> int:
    """Measures both output modes; exit status 1 when the median of `schedule` exceeds the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=1000, help="prompt tokens of each request")
    arguments = parser.parse_args()
    worst = 0.0
    for deferred in (False, True):
        times = measure(arguments.requests, arguments.steps, deferred, arguments.prompt)
        row = {
            "benchmark": "scheduler_planning",
            "deferred": deferred,
            "requests": arguments.requests,
            "steps": arguments.steps,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "budget_ms": BUDGET_MS,
        }
        for name, values in times.items():
            row[f"{name}_median_ms"] = round(statistics.median(values), 3)
            row[f"{name}_p99_ms"] = round(sorted(values)[int(0.99 * (len(values) - 1))], 3)
        print(json.dumps(row))
        worst = max(worst, statistics.median(times["schedule"]))
    return int(worst > BUDGET_MS)


if __name__ == "__main__":
    sys.exit(main())
