"""Many streaming clients with random disconnects against a running server: nothing lost, nothing mixed, nothing left.

    python -m benchmarks.soak --url http://127.0.0.1:8000 --clients 64 --seconds 120

Every client asks greedily for one of a few prompts and compares what it gets, token text by token text, with what the
prompt gave when it ran alone. A third of the clients leave in the middle. Afterwards the server's metrics must show no
running request, no page in use and all slots free. Prints one JSON line; exits with 1 when anything was wrong.
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


async def stream(client: httpx.AsyncClient, prompt: str, leave_after: int | None) -> tuple[str, bool]:
    """Text of a greedy completion, and whether it ran to its end."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True, "ignore_eos": True}
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


async def soak(url: str, clients: int, seconds: float, seed: int = 0) -> dict[str, object]:
    """Runs the load.

    Returns:
      Counts of what happened, and `faults`, a list that is empty when everything was right.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        prompts = [f"Story {number}: " + "once upon a time " * (3 * number + 1) for number in range(PROMPTS)]
        expected = [(await stream(client, prompt, None))[0] for prompt in prompts]
        start = await gauges(client)
        counts: Counter[str] = Counter()
        faults: list[str] = []
        end = time.monotonic() + seconds

        async def one(number: int) -> None:
            chance = random.Random(seed * 1000 + number)
            while time.monotonic() < end:
                which = chance.randrange(PROMPTS)
                leave = chance.randrange(1, TOKENS) if chance.random() < LEAVES else None
                try:
                    text, whole = await stream(client, prompts[which], leave)
                except (httpx.HTTPError, RuntimeError) as error:
                    faults.append(f"client {number}: {type(error).__name__}: {error}")
                    return
                counts["whole" if whole else "left"] += 1
                right = text == expected[which] if whole else expected[which].startswith(text)
                if not right:
                    faults.append(f"client {number}: {text!r} is not {expected[which]!r}")

        await asyncio.gather(*map(one, range(clients)))
        for _ in range(100):
            final = await gauges(client)
            if not final["v41jax_requests_running"] and not final["v41jax_requests_waiting"]:
                break
            await asyncio.sleep(0.1)
        for name in ("v41jax_requests_running", "v41jax_requests_waiting", "v41jax_pages_used", "v41jax_http_open"):
            if final[name]:
                faults.append(f"{name} is {final[name]} afterwards")
        if final["v41jax_slots_free"] != start["v41jax_slots_free"]:
            faults.append(f"{final['v41jax_slots_free']} slots are free, {start['v41jax_slots_free']} were before")
        tokens = final["v41jax_generated_tokens_total"] - start["v41jax_generated_tokens_total"]
        grown = final["process_resident_memory_bytes"] - start["process_resident_memory_bytes"]
    return {
        "clients": clients,
        "seconds": seconds,
        **counts,
        "tokens": tokens,
        "memory_growth_bytes": grown,
        "faults": faults,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = asyncio.run(soak(arguments.url, arguments.clients, arguments.seconds, arguments.seed))
    print(json.dumps(result))
    sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
    main()
