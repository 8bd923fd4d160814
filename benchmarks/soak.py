"""Many streaming clients with random disconnects against a running server: nothing lost, nothing mixed, nothing left.

    python -m benchmarks.soak --url http://127.0.0.1:8000 --clients 64 --seconds 120 [--greedy]

Every request has a text of its own that its grammar prescribes, and whatever arrives must be that text or its start.
With `--greedy` half of the requests ask for what the model says to one of a few prompts instead, and compare it with
what it said when the prompt ran alone: for a server whose numbers depend neither on neighbours nor on cache hits, which
is one with --dtype float32 --no-activation-quantization --no-encoder-swa-bounded-replay. A third of the clients leave
in the middle. Afterwards the server's metrics must show no running request, no page in use, all slots free, no more
tasks than before, no program compiled under load, and memory no larger than after a quarter of the time, but for a
little. Prints one JSON line; exits with 1 on a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter

import httpx

PROMPTS = 6
TOKENS = 24
LEAVES = 0.33
SETTLED = 0.25
"""Share of the time after which memory must not grow any more: buffers of so many connections exist by then."""
GROWTH_BYTES = 64 * 2**20
SAMPLE_S = 5.0
MEMORY = "process_resident_memory_bytes"
TASKS = "v41jax_event_loop_tasks"
RECOMPILES = "v41jax_recompiles_total"
ZERO_AFTERWARDS = ("v41jax_requests_running", "v41jax_requests_waiting", "v41jax_pages_used", "v41jax_http_open")


def greedy(prompt: str) -> dict[str, object]:
    """A request for what the model says."""
    return {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


def prescribed(prompt: str, text: str) -> dict[str, object]:
    """A request whose grammar knows one text."""
    return {"prompt": prompt, "max_tokens": len(text) + 1, "structured_outputs": {"choice": [text]}}


async def stream(client: httpx.AsyncClient, body: dict[str, object], leave_after: int | None) -> tuple[str, bool]:
    """Text of a streamed completion, and whether it ran to its end."""
    body = body | {"stream": True}
    text, chunks = "", 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                return text, True
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            text += event["choices"][0]["text"]
            chunks += 1
            if leave_after is not None and chunks >= leave_after:
                return text, False
    return text, False


async def gauges(client: httpx.AsyncClient) -> dict[str, float]:
    """Metrics without labels."""
    lines = (await client.get("/metrics")).text.splitlines()
    pairs = (line.split(" ") for line in lines if not line.startswith("#") and "{" not in line)
    return {name: float(value) for name, value in pairs}


async def soak(url: str, clients: int, seconds: float, seed: int = 0, *, compare: bool = False) -> dict[str, object]:
    """Runs the load; with `compare`, half of it greedy texts that are compared with those of prompts alone.

    Returns:
      Counts of what happened, and `faults`, a list that is empty when everything was right.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        prompts = [f"Story {number}: " + "once upon a time " * (3 * number + 1) for number in range(PROMPTS)]
        expected = [(await stream(client, greedy(prompt), None))[0] for prompt in prompts]
        await stream(client, prescribed(prompts[0], "once"), None)
        start = await gauges(client)
        counts: Counter[str] = Counter()
        faults: list[str] = []
        end = time.monotonic() + seconds

        async def one(number: int) -> None:
            chance = random.Random(seed * 1000 + number)
            while time.monotonic() < end:
                which = chance.randrange(PROMPTS)
                leave = chance.randrange(1, TOKENS) if chance.random() < LEAVES else None
                right = expected[which]
                body = greedy(prompts[which])
                if not compare or chance.random() < 0.5:
                    counts["prescribed"] += 1
                    right = f"Client {number} was told {chance.randrange(10**9)} and says so."
                    body = prescribed(prompts[which], right)
                try:
                    text, whole = await stream(client, body, leave)
                except (httpx.HTTPError, RuntimeError) as error:
                    faults.append(f"client {number}: {type(error).__name__}: {error}")
                    return
                counts["whole" if whole else "left"] += 1
                if text != right if whole else not right.startswith(text):
                    faults.append(f"client {number}: {text!r} is not {right!r}")

        async def watch() -> None:
            while time.monotonic() < end:
                samples.append(await gauges(client))
                await asyncio.sleep(min(SAMPLE_S, seconds / 20))

        samples: list[dict[str, float]] = []
        await asyncio.gather(watch(), *map(one, range(clients)))
        settled = samples[int(len(samples) * SETTLED)]
        final = await idle_gauges(client, start, settled)
        faults += left_behind(start, settled, final)
    return {
        "clients": clients,
        "seconds": seconds,
        **counts,
        "tokens": final["v41jax_generated_tokens_total"] - start["v41jax_generated_tokens_total"],
        "cancelled": final["v41jax_requests_aborted_total"] - start["v41jax_requests_aborted_total"],
        "most_running": max(sample["v41jax_requests_running"] for sample in samples),
        "most_waiting": max(sample["v41jax_requests_waiting"] for sample in samples),
        "most_pages_used": max(sample["v41jax_pages_used"] for sample in samples),
        "memory_bytes": {"before": start[MEMORY], "settled": settled[MEMORY], "after": final[MEMORY]},
        "tasks": {"before": start[TASKS], "most": max(sample[TASKS] for sample in samples), "after": final[TASKS]},
        "faults": faults,
    }


async def idle_gauges(
    client: httpx.AsyncClient, start: dict[str, float], settled: dict[str, float], seconds: float = 30
) -> dict[str, float]:
    """Metrics once nothing is left behind, or after some seconds of trying."""
    end = time.monotonic() + seconds
    while True:
        final = await gauges(client)
        if time.monotonic() > end or not left_behind(start, settled, final):
            return final
        await asyncio.sleep(0.1)


def left_behind(start: dict[str, float], settled: dict[str, float], final: dict[str, float]) -> list[str]:
    """What a server that has nothing to do still holds.

    Args:
      start: metrics before the load.
      settled: metrics under load, when memory must not grow any more.
      final: metrics afterwards.
    """
    faults = [f"{name} is {final[name]} afterwards" for name in ZERO_AFTERWARDS if final[name]]
    if final["v41jax_slots_free"] != start["v41jax_slots_free"]:
        faults.append(f"{final['v41jax_slots_free']} slots are free, {start['v41jax_slots_free']} were before")
    if final[TASKS] > start[TASKS]:
        faults.append(f"{final[TASKS]} tasks are left, {start[TASKS]} were there before")
    if final[RECOMPILES] != start[RECOMPILES]:
        faults.append(f"{final[RECOMPILES] - start[RECOMPILES]} programs were compiled under load")
    grown = final[MEMORY] - settled[MEMORY]
    if grown > GROWTH_BYTES:
        faults.append(f"memory grew by {grown} bytes after it had settled; {GROWTH_BYTES} are accepted")
    return faults


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--greedy", action="store_true", help="compare greedy texts too")
    arguments = parser.parse_args()
    load = soak(arguments.url, arguments.clients, arguments.seconds, arguments.seed, compare=arguments.greedy)
    result = asyncio.run(load)
    print(json.dumps(result))
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
