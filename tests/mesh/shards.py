"""Serves scenarios through the engine on meshes with data shards; to be run in a process of its own.

`python -m tests.mesh.shards CHECKPOINT MESH...`, a mesh as `DATAxMODEL[:experts][:OPTION...]` with the options of
`OPTIONS`. Prints one JSON object a mesh: what every request of the scenario got, and the engine's statistics.
`CHECKPOINT MESH --hosts HOST:PORT PROCESS` is one of two processes, which serve the requests of `OF_ONE_CHUNK` twice;
with the option `stays` they stay, with `fails` the next step fails in process 0 alone. `--hosts auto` takes the
processes from the environment.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from scheduler.pools import poison
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from scheduler.sequence import Sequence as RequestSequence
from scheduler.sharded import ShardedScheduler
from tests.vision.builders import random_image
from v41jax.engine import Engine
from v41jax.engine_requests import Prompt
from v41jax.following import follow_checkpoint
from v41jax.mesh_runner import MeshRunner
from v41jax.serving_options import in_cluster

PAGE = 32
SLOTS, PAGES = 2, 9
"""Of each shard: a shard runs two requests and preempts when both are long."""

OPTIONS: dict[str, dict[str, Any]] = {
    "long": {},
    "small": {"max_num_seqs": 4, "decode_buckets": (1,), "long_prefill_token_threshold": 0},
    "warm": {},
    "images": {"vision": "on"},
    "replay": {"encoder_swa_bounded_replay": True, "decoder_swa_bounded_replay": True},
    "drafts": {"speculative_method": "dspark", "num_speculative_tokens": 5},
    "tiers": {"host_cache_bytes": 1 << 24},
    "scores": {"prompt_logprobs": True},
    "ragged": {"expert_exchange": "ragged"},
    "stays": {},
    "fails": {},
}
"""Options of the engine by name; `long` runs the whole scenario and not only the first requests, `small` gives each of
four shards one slot, and `warm` compiles everything ahead."""

OF_ONE_CHUNK = (1, 2, 4)
"""Of the first requests those that one prefill step computes."""


def options(data: int, model: int, experts: bool, names: list[str]) -> EngineConfig:
    """Options of one mesh; every shard is as large whatever their number."""
    config = EngineConfig(
        dtype="float32",
        activation_quantization=False,
        kv_cache_block_size=PAGE,
        max_num_batched_tokens=96 * data,
        long_prefill_token_threshold=64,
        max_num_seqs=SLOTS * data,
        max_model_len=6 * PAGE,
        num_pages=PAGES,
        encoder_swa_bounded_replay=False,
        decoder_swa_bounded_replay=False,
        state_checkpoint_interval_tokens=PAGE,
        decode_buckets=(SLOTS,),
        mesh={"data": data, "model": model},
        enable_expert_parallel=experts,
        vision="off",
    )
    for name in names:
        config = dataclasses.replace(config, **OPTIONS[name])
    return config


def greedy(count: int, **changes: Any) -> SamplingParams:
    """Exactly `count` tokens."""
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **changes)


def first_requests(vocabulary: int) -> list[Prompt]:
    """Mixed lengths and ways to choose tokens; more requests than slots arrive over time."""
    random = np.random.default_rng(3)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(random.integers(3, vocabulary - 10, count).tolist())

    drawn = SamplingParams(max_tokens=7, temperature=1.0, seed=9, ignore_eos=True, logit_bias=((7, 1.0),))
    return [
        Prompt(ids(90), greedy(9)),
        Prompt(ids(37), drawn, arrival_step=1),
        Prompt(ids(5), greedy(12, logprobs=2, presence_penalty=0.5), arrival_step=2),
        Prompt(ids(70), greedy(6), arrival_step=2),
        Prompt(ids(64), greedy(5), arrival_step=5),
    ]


def long_requests(vocabulary: int) -> list[Prompt]:
    """Requests with common prefixes, any two of which grow beyond the pages of a shard."""
    random = np.random.default_rng(4)
    first = random.integers(3, vocabulary - 10, 64).tolist()
    tails = [random.integers(3, vocabulary - 10, 9).tolist() for _ in range(5)]
    return [
        Prompt((*first[: 64 - 32 * (number % 2)], *tail), greedy(110), arrival_step=3 * number)
        for number, tail in enumerate(tails)
    ]


def image_requests(engine: Engine) -> list[Prompt]:
    """Images beside text, on as many shards as there are requests."""
    config = engine.core.runner.setup.config
    random = np.random.default_rng(5)
    prompts = []
    for number in range(3):
        ids = random.integers(3, config.image_token_id - 10, 20 + 9 * number).tolist()
        ids[4 + number] = config.image_token_id
        picture = random_image(config.vision, 4 + number, 5, seed=number)
        prompts.append(engine.prompt_with_images(ids, [picture], greedy(4)))
    return [*prompts, Prompt(tuple(random.integers(3, 200, 30).tolist()), greedy(4))]


def spoil(engine: Engine) -> None:
    """Every byte of the pools that the engine just made is NaN."""
    runner = engine.core.runner
    pools = jax.jit(poison, donate_argnums=0)(runner.pools) if runner.setup.parallel.chips == 1 else None
    if pools is None:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, runner.pools)
        pools = jax.jit(poison, donate_argnums=0, out_shardings=shardings)(runner.pools)
    runner.replace_pools(pools)


def told_proposals(engine: Engine, known: dict[tuple[int, ...], list[int]]) -> None:
    """Drafts are what requests are known to say next, up to a place that varies; what is not known stays drafted."""
    scheduler, width = engine.core.scheduler, engine.config.num_speculative_tokens
    propose = scheduler.propose

    def proposals(request_id: Any, generation: int, tokens: Any) -> bool:
        sequence = scheduler.sequence(request_id)
        if sequence is not None:
            prompt = tuple(sequence.tokens(0, sequence.num_prompt_tokens).tolist())
            said = sequence.num_tokens - len(prompt)
            right = known.get(prompt, [])[said : said + sequence.num_tokens % (width + 1)]
            tokens = [*right, *tokens[len(right) :]]
        return propose(request_id, generation, tokens)

    scheduler.propose = proposals  # type: ignore[method-assign]


def watch_pools_of_drafts(engine: Engine) -> dict[str, int]:
    """Counts draft calls, and those after which some chip's part of the pools lies elsewhere than before."""
    runner, counts = engine.core.runner, {"calls": 0, "moved": 0}
    draft = runner.draft  # type: ignore[attr-defined]

    def places() -> list[int]:
        shards = [shard for leaf in jax.tree.leaves(runner.pools) for shard in leaf.addressable_shards]
        return [shard.data.unsafe_buffer_pointer() for shard in shards]

    def watched(*arguments: Any) -> Any:
        before = places()
        block = draft(*arguments)
        counts["calls"] += 1
        counts["moved"] += places() != before
        return block

    runner.draft = watched  # type: ignore[attr-defined]
    return counts


def play(engine: Engine, prompts: list[Prompt], abort: int | None = None) -> list[dict[str, Any]]:
    """What every request got; the one numbered `abort` is cancelled four steps after its arrival."""
    names: dict[int, Any] = {}
    got: list[dict[str, Any]] = [{"tokens": [], "scores": [], "prompt_scores": [], "reason": None} for _ in prompts]
    step = 0
    while engine.core.has_work or len(names) < len(prompts):
        for number, prompt in enumerate(prompts):
            if number not in names and prompt.arrival_step <= step:
                names[number] = engine.submit(prompt)
        if abort is not None and step == prompts[abort].arrival_step + 4:
            engine.abort(names[abort])
        numbers = {name: number for number, name in names.items()}
        for name, delta, generation in engine.step():
            mine = got[numbers[name]]
            mine["tokens"] += delta.tokens
            mine["scores"] += [
                [round(score.logprob, 3), [token for token, _ in score.alternatives]] for score in delta.scores
            ]
            scored = [None if score is None else round(score.logprob, 3) for score in delta.prompt_scores]
            mine["prompt_scores"] += scored
            if generation is not None:
                mine |= {"reason": generation.finish_reason, "cached": generation.cached_tokens}
        step += 1
    if abort is not None:
        got[abort]["tokens"] = []
    return got


def serve(engine: Engine, names: list[str], known: dict[tuple[int, ...], list[int]]) -> dict[str, Any]:
    """Runs the scenario; `known` receives what every prompt was answered with, and drafts repeat it."""
    spoil(engine)
    drafting: dict[str, int] = {}
    if "drafts" in names:
        told_proposals(engine, dict(known))
        drafting = watch_pools_of_drafts(engine)
    vocabulary = engine.core.runner.setup.config.text.vocab_size
    first = first_requests(vocabulary)
    if "scores" in names:
        scored = dataclasses.replace(first[0].sampling, logprobs=1, prompt_logprobs=True)
        first[0] = dataclasses.replace(first[0], sampling=scored)
    results = play(engine, first)
    known |= {prompt.tokens: result["tokens"] for prompt, result in zip(first, results, strict=True)}
    again = [dataclasses.replace(first[index], arrival_step=0) for index in (0, 3)]
    turn = dataclasses.replace(again[0], tokens=(*first[0].tokens, *results[0]["tokens"], 5, 6, 7))
    results += play(engine, [*again, turn])
    more: dict[str, list[dict[str, Any]]] = {}
    if "long" in names:
        later = long_requests(vocabulary)
        more["long"] = play(engine, later, abort=2)
        known |= {prompt.tokens: result["tokens"] for prompt, result in zip(later, more["long"], strict=True)}
    if "images" in names:
        more["images"] = play(engine, image_requests(engine))
    shared = share(engine, vocabulary) if "tiers" in names else None
    statistics = engine.statistics()
    return {
        "requests": {"first": results, **more},
        "shared": shared,
        "drafting": drafting,
        "statistics": {
            key: statistics.get(key)
            for key in ("preemptions", "hit_tokens", "recompiles_after_warm_up", "shards", "accepted_tokens", "steps")
        },
        "transfers": statistics.get("transfers"),
        "summary": {key: engine.summary().get(key) for key in ("mesh", "experts", "pages", "slots", "operations")},
    }


def share(engine: Engine, vocabulary: int) -> dict[str, Any]:
    """The same prompt twice: on the shard that computes it, and, while that is full, on the other one."""
    scheduler = engine.core.scheduler
    ids = tuple(np.random.default_rng(8).integers(3, vocabulary - 10, 100).tolist())
    homes, tokens, cached = [], {}, {}

    def submit(prompt: Prompt) -> Any:
        name = engine.submit(prompt)
        homes.append(scheduler.home(name) if isinstance(scheduler, ShardedScheduler) else 0)
        return name

    def drain() -> None:
        while engine.core.has_work:
            for name, _, generation in engine.step():
                if generation is not None:
                    tokens[name], cached[name] = list(generation.tokens), generation.cached_tokens

    names = [submit(Prompt(ids, greedy(4)))]
    drain()
    if isinstance(scheduler, ShardedScheduler):
        choose, scheduler.choose = scheduler.choose, lambda _: homes[0]  # type: ignore[method-assign]
        for number in range(SLOTS):
            submit(Prompt((number + 3, *ids[:40]), greedy(30)))
        scheduler.choose = choose  # type: ignore[method-assign]
    names.append(submit(Prompt(ids, greedy(4))))
    drain()
    return {"homes": homes, "tokens": [tokens[name] for name in names], "cached": [cached[name] for name in names]}


def parse(mesh: str) -> tuple[EngineConfig, list[str]]:
    """Options of a mesh by its name, and their names."""
    size, *names = mesh.split(":")
    data, model = map(int, size.split("x"))
    named = [option for option in names if option != "experts"]
    return options(data, model, "experts" in names, named), named


def serve_over_processes(engine: Engine, names: list[str]) -> dict[str, Any]:
    """Requests of one chunk each, one after the other so that few programs are compiled; again, when their pages are
    known and drafts repeat the answers; with tiers the last once more, on another shard than the one that has it."""
    first, scheduler = first_requests(engine.core.runner.setup.config.text.vocab_size), engine.core.scheduler
    requests = [dataclasses.replace(first[number], arrival_step=2 * place) for place, number in enumerate(OF_ONE_CHUNK)]
    results = [play(engine, requests)]
    if "drafts" in names:
        told_proposals(engine, {one.tokens: got["tokens"] for one, got in zip(requests, results[0], strict=True)})
    results.append(play(engine, requests))
    if isinstance(scheduler, ShardedScheduler) and "tiers" in names:
        last = requests[-1]
        home = scheduler.choose(RequestSequence("probe", np.array(last.tokens, np.int32), last.sampling))
        scheduler.choose = lambda _: 1 - home  # type: ignore[method-assign]
        results.append(play(engine, [dataclasses.replace(last, arrival_step=0)]))
    return {"rounds": results, "statistics": engine.statistics()}


def fail_in_a_step(engine: Engine) -> None:
    """A step that the followers begin and this process does not."""

    def execute(*_: Any) -> Any:
        raise RuntimeError("only here")

    MeshRunner.execute = execute  # type: ignore[method-assign]
    engine.submit(Prompt((3, 4, 5), greedy(4)))
    engine.step()


def main() -> None:
    checkpoint = Path(sys.argv[1])
    if "--hosts" in sys.argv:
        config, names = parse(sys.argv[2])
        config = dataclasses.replace(config, coordinator=sys.argv[4])
        for process in sys.argv[5:]:
            config = dataclasses.replace(config, num_processes=2, process_id=int(process))
        config = in_cluster(checkpoint, config)
        if config.process_id:
            follow_checkpoint(checkpoint, config)
            return
        with Engine.from_checkpoint(checkpoint, config, warm_up="warm" in names) as engine:
            print(json.dumps(serve_over_processes(engine, names)), flush=True)
            if "stays" in names:
                time.sleep(120)
            if "fails" in names:
                fail_in_a_step(engine)
        return
    known: dict[tuple[int, ...], list[int]] = {}
    for name in sys.argv[2:]:
        config, names = parse(name)
        began = time.perf_counter()
        with Engine.from_checkpoint(checkpoint, config, warm_up="warm" in names) as engine:
            built = time.perf_counter()
            result = serve(engine, names, known)
            result["seconds"] = [round(built - began, 1), round(time.perf_counter() - built, 1)]
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
