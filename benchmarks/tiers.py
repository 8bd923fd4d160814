"""Time to the first token with pages in a tier against computing them: `python -m benchmarks.tiers --model DIR`.

For every length and tier a new prompt is computed (cold), then asked for again after the device forgot it: its pages
come from the tier, its windows by bounded replay. Prints JSON lines; `computed_s` and `fetched_s` are medians over the
repetitions of the wall time to the first token, `cpu_*` the CPU seconds of the process beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay import origin
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from scheduler.tiers.build import open_store
from scheduler.tiers.keys import CacheIdentity
from scheduler.tiers.page_tiers import PageTiers
from v41jax.engine import Engine, Prompt
from v41jax.page_transfer import DevicePages

FIRST = SamplingParams(max_tokens=1, ignore_eos=True)


@contextlib.contextmanager
def store_server() -> Iterator[str | None]:
    """Address of a Redis or Valkey server of this machine; None when neither is installed."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def first_token(engine: Engine, tokens: tuple[int, ...]) -> tuple[float, float, int]:
    """(wall seconds, CPU seconds, reused tokens) to the first token of a prompt."""
    began = time.process_time()
    result = engine.generate([Prompt(tokens, FIRST)])[0]
    return result.time_to_first_token_s, time.process_time() - began, result.cached_tokens


def forget(engine: Engine) -> None:
    """Makes every page of the device reusable by none, once all writes are done."""
    tiers = engine.core.scheduler.tiers
    assert tiers is not None
    while tiers.statistics()["transfers"]["saving_bytes"]:
        time.sleep(0.01)
    manager = engine.core.scheduler.manager
    if manager.images is not None:
        manager.images.drop_all()
    manager.pool.release_raw(manager.pool.reserve_raw(manager.pool.num_free))


def measure(engine: Engine, length: int, repetitions: int, seed: int) -> dict[str, Any]:
    """Medians for one length."""
    vocabulary = engine.core.runner.setup.config.text.vocab_size
    rng = np.random.default_rng(seed)
    computed, fetched, hit = [], [], 0
    for _ in range(repetitions):
        tokens = tuple(rng.integers(5, vocabulary // 2, length).tolist())
        computed.append(first_token(engine, tokens)[:2])
        forget(engine)
        *times, hit = first_token(engine, tokens)
        fetched.append(tuple(times))
        forget(engine)
    wall, cpu = (statistics.median(values) for values in zip(*computed, strict=True))
    fetched_wall, fetched_cpu = (statistics.median(values) for values in zip(*fetched, strict=True))
    return {
        "tokens": length,
        "reused_tokens": hit,
        "computed_s": round(wall, 4),
        "fetched_s": round(fetched_wall, 4),
        "ratio": round(wall / fetched_wall, 2),
        "cpu_computed_s": round(cpu, 4),
        "cpu_fetched_s": round(fetched_cpu, 4),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--lengths", default="1024,4096,16384")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--tiers", default="host,disk,shared")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    lengths = [int(part) for part in arguments.lengths.split(",")]
    with store_server() as url, tempfile.TemporaryDirectory() as directory:
        config = EngineConfig(
            dtype=arguments.dtype,
            max_model_len=max(lengths) + 256,
            max_num_batched_tokens=1024,
            max_num_seqs=1,
            num_pages=max(lengths) // 128 + 4,
            vision="off",
        )
        every: dict[str, dict[str, Any]] = {
            "host": {"host_cache_bytes": 1 << 31},
            "disk": {"disk_cache_dir": directory},
            "shared": {"shared_cache_url": url, "shared_cache_timeout": 10.0},
        }
        with Engine.from_checkpoint(arguments.model, config, warm_up=False) as engine:
            compiled: set[int] = set()
            for tier in arguments.tiers.split(","):
                if tier == "shared" and url is None:
                    print(json.dumps({"tier": tier, "left_out": "no valkey-server or redis-server is installed"}))
                    continue
                tiers = attach(engine, dataclasses.replace(config, **every[tier]))
                for length in lengths:
                    if length not in compiled:
                        measure(engine, length, 1, 1)
                        compiled.add(length)
                    line = measure(engine, length, arguments.repetitions, 2 + length)
                    unit = tiers.layout.unit_bytes
                    print(json.dumps({"tier": tier, "page_bytes": unit, **line, **origin()}), flush=True)
                tiers.close()


def attach(engine: Engine, config: EngineConfig) -> PageTiers:
    """Connects the tiers of the options to an idle engine."""
    runner = engine.core.runner
    memory = DevicePages(runner, runner.setup.geometry)
    memory.warm_up(images=False)
    identity = CacheIdentity("benchmark", "", memory.layout.layout_id, "")
    store = open_store(config, memory.layout, identity)
    assert store is not None
    block = runner.setup.geometry.block_size
    tiers = PageTiers(store, memory.layout, identity, memory, block_size=block, timeout_s=60.0)
    engine.core.scheduler.attach(tiers)
    return tiers


if __name__ == "__main__":
    main()
