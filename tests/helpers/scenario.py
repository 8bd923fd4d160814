"""Random serving histories: arrivals, shared prefixes, preemptions, cancellations, small pools, every mode.

`draw(seed)` gives a scenario, `play(scenario, make_runner, expected)` runs it against any runner with the step
interface of `tests.helpers.driver.Driver` and compares every request with `expected(request, count)`, the tokens of an
uninterrupted run. The same seed always gives the same history.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from scheduler.model_view import ModelView
from scheduler.outcomes import Statistics
from scheduler.runtime_config import EngineConfig, validate_runtime_config
from scheduler.scheduler import Scheduler
from scheduler.sequence import ImageSpan, SamplingParams
from tests.helpers.driver import MODES, Driver

SMALL_VIEW = ModelView(
    layers=12,
    owners=((2, 2), (4, 2), (6, 1)),
    layer_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
    window_size=32,
    head_dim=64,
    index_dim=32,
    index_topk=16,
    history_size=3,
    engram_layers=(1, 4),
    image_token_id=498,
    eos_token_ids=tuple(range(12)),
    max_position=4096,
    num_attention_heads=8,
    index_n_heads=4,
    o_groups=4,
    moe_intermediate_size=64,
    n_routed_experts=8,
)
"""A model's numbers with the owner pattern of the released one; about one token in forty ends a generation."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a scenario.

    Attributes:
      arrival: step before which it is submitted.
      abort: step before which it is cancelled; None never.
    """

    request_id: int
    arrival: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    images: tuple[ImageSpan, ...] = ()
    abort: int | None = None


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One history.

    Attributes:
      seed: of the disturbances drawn while it runs.
      mode: output mode of the engine loop, one of `tests.helpers.driver.MODES`.
      preempt, relocate, reorder: probability per step of the disturbance.
      ragged: the long-prefill cap is drawn anew every step, odd values included.
    """

    seed: int
    view: ModelView
    config: EngineConfig
    num_pages: int
    num_slots: int
    mode: str
    requests: tuple[Request, ...]
    preempt: float = 0.0
    relocate: float = 0.0
    reorder: float = 0.0
    ragged: bool = False


@dataclasses.dataclass(frozen=True)
class Report:
    """What a played scenario did."""

    finished: dict
    statistics: Statistics
    stores: int
    restores: int


def draw(
    seed: int,
    *,
    view: ModelView = SMALL_VIEW,
    vocab: int = 490,
    replays: tuple[bool, bool] | None = None,
    mode: str | None = None,
    with_images: bool = True,
    max_requests: int = 9,
) -> Scenario:
    """Draws a scenario.

    Args:
      seed: determines everything.
      view: the model's numbers; its window is kept.
      vocab: prompt ids lie in `[12, vocab)`.
      replays: (encoder, decoder) switches; None draws them.
      mode: output mode; None draws it.
      with_images: some prompts hold image spans.
      max_requests: requests at most.
    """
    rng = random.Random(seed)
    if view is SMALL_VIEW:
        view = dataclasses.replace(view, window_size=rng.choice((8, 16, 32, 33)))
    page = 32 * (-(-max(view.window_size - 1, 1) // 32) + (rng.random() < 0.1))
    encoder, decoder = replays if replays is not None else (rng.random() < 0.5, rng.random() < 0.5)
    budget = page * rng.choice((2, 2, 3, 4, 6)) + rng.choice((0, 0, 1, 17))
    if not encoder and not decoder:
        budget = rng.choice((5, 33, budget))
    max_len = rng.choice((6, 8, 12)) * page
    chunked = rng.random() < 0.85
    config = EngineConfig(
        kv_cache_block_size=page,
        enable_prefix_caching=rng.random() < 0.9,
        encoder_swa_bounded_replay=encoder,
        decoder_swa_bounded_replay=decoder,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=rng.choice((0, page, page + 2, 2 * page)),
        max_num_seqs=rng.choice((1, 2, 3, 4, 6)),
        max_model_len=max_len,
        state_checkpoint_interval_tokens=rng.choice((page, page, 2 * page, -1, 0)),
        decode_buckets=rng.choice(((), (), (2,))),
        num_pages=rng.choice((6, 10, 16, 24, 40)),
    )
    validate_runtime_config(config, view)
    bases = [[rng.randrange(12, vocab) for _ in range(max_len)] for _ in range(rng.choice((1, 2, 3)))]
    spans = [_draw_image(rng, page) if with_images and rng.random() < 0.3 else None for _ in bases]
    requests = []
    for request_id in range(rng.randint(2, max_requests)):
        family = rng.randrange(len(bases))
        shared = rng.choice((0, rng.randint(0, 4 * page), page * rng.randint(1, 4)))
        prompt = bases[family][:shared] + [rng.randrange(12, vocab) for _ in range(rng.randint(0, 2 * page))]
        prompt = prompt[: max_len + 3] or [12]
        if rng.random() < 0.9:
            prompt = prompt[:max_len]
        images: tuple[ImageSpan, ...] = ()
        span = spans[family]
        if span is not None and span.start + span.length <= len(prompt):
            images = (span._replace(digest=rng.choice((span.digest, b"another"))),)
            prompt[span.start : span.start + span.length] = [view.image_token_id] * span.length
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, rng.randint(1, 20), rng.randint(1, 3 * page))),
            ignore_eos=rng.random() < 0.7,
            stop_token_ids=rng.choice(((), (), (20, 21, 22))),
            stop_sequences=rng.choice(((), ((30,), (31,)))),
        )
        arrival = rng.choice((0, 0, rng.randint(0, 60)))
        abort = arrival + rng.randint(0, 25) if rng.random() < 0.15 else None
        requests.append(Request(request_id, arrival, tuple(prompt), sampling, images, abort))
    return Scenario(
        seed=seed,
        view=view,
        config=config,
        num_pages=config.num_pages or 1,
        num_slots=config.max_num_seqs,
        mode=mode or rng.choice(MODES),
        requests=tuple(requests),
        preempt=rng.choice((0.0, 0.0, 0.05, 0.2)),
        relocate=rng.choice((0.0, 0.0, 0.1)),
        reorder=rng.choice((0.0, 0.3)),
        ragged=chunked and rng.random() < 0.3,
    )


def with_drafts(scenario: Scenario, width: int = 5) -> Scenario:
    """The same history for an engine that verifies up to `width` proposals a step."""
    config = dataclasses.replace(
        scenario.config,
        speculative_method="dspark",
        num_speculative_tokens=width,
        max_num_batched_tokens=max(scenario.config.max_num_batched_tokens, width + 1),
    )
    view = dataclasses.replace(
        scenario.view, layer_ratios=(*scenario.view.layer_ratios, 0, 0, 0), draft_layers=3, draft_tokens=5
    )
    validate_runtime_config(config, view)
    return dataclasses.replace(scenario, config=config, view=view, mode="immediate")


def _draw_image(rng: random.Random, page: int) -> ImageSpan:
    return ImageSpan(rng.randint(0, 2 * page), rng.randint(1, 2 * page), bytes([rng.randrange(256)]) * 8)


def play(
    scenario: Scenario,
    make_runner: Callable[[Scheduler], object],
    expected: Callable[[Request, int], Sequence[int]],
    *,
    compress_ids: Callable,
    check: bool = True,
    max_steps: int = 5_000,
    drafter: Callable[[Any], Sequence[int]] | None = None,
) -> Report:
    """Runs a scenario to the end and checks every request's output.

    Args:
      scenario: the history.
      make_runner: gets the scheduler, whose manager knows pages, slots and image capacity.
      expected: (request, count) -> the first `count` tokens of an uninterrupted run.
      compress_ids: raw ids -> compressed ids.
      check: assert the invariants at every step.
      max_steps: steps after which the scheduler counts as stuck.
      drafter: proposals for a decoding request, of a scenario `with_drafts`.
    """
    config = scenario.config
    geometry = config.geometry(scenario.view)
    scheduler = Scheduler(
        config, scenario.view, geometry, scenario.num_pages, scenario.num_slots, deferred=scenario.mode != "immediate"
    )
    driver = Driver(
        scheduler, make_runner(scheduler), mode=scenario.mode, compress_ids=compress_ids, check=check, drafter=drafter
    )
    return drive(scenario, driver, expected, max_steps=max_steps)


def drive(
    scenario: Scenario,
    driver: Any,
    expected: Callable[[Request, int], Sequence[int]],
    *,
    max_steps: int = 5_000,
) -> Report:
    """As `play`, for any engine loop that has what is used of `Driver` here; `shards` are disturbed each by itself."""
    rng = random.Random(scenario.seed ^ 0x5EED)
    scheduler = driver.scheduler
    shards = getattr(driver, "shards", (driver,))
    rules = [shard.scheduler.rules for shard in shards]
    last_event = max(max(request.arrival, request.abort or 0) for request in scenario.requests)
    for step in range(max_steps):
        for request in scenario.requests:
            if request.arrival == step:
                driver.add(request.request_id, request.prompt, request.sampling, request.images)
            if request.abort == step:
                scheduler.abort(request.request_id)
        if step > last_event and not scheduler.has_work:
            break
        for shard, rule in zip(shards, rules, strict=True):
            if scenario.ragged:
                shard.scheduler.rules = dataclasses.replace(rule, cap=rng.choice((1, 3, 7, 32, rng.randint(1, 70))))
            disturb(scenario, shard.scheduler, rng)
        driver.step()
    else:
        raise AssertionError(f"seed {scenario.seed}: busy after {max_steps} steps: {scheduler.statistics()}")
    for shard in shards:
        if shard.checker:
            shard.checker.drained()
    of_one = dataclasses.replace(scenario, config=scenario.config.of_shard())
    for request in scenario.requests:
        check_outcome(of_one, request, driver.finished[request.request_id], expected)
    return Report(
        finished=driver.finished,
        statistics=scheduler.statistics(),
        stores=sum(len(batch.ops.stores) for batch in driver.log),
        restores=sum(len(batch.ops.restores) for batch in driver.log),
    )


def disturb(scenario: Scenario, scheduler: Scheduler, rng: random.Random) -> None:
    """Preempts, relocates and reorders at random."""
    # Bounded, so that a prompt longer than the time between two preemptions still ends.
    if scheduler.running and rng.random() < scenario.preempt and scheduler.counters.preemptions < 40:
        scheduler.preempt(rng.choice(scheduler.running).request_id)
    if scheduler.running and rng.random() < scenario.relocate and not scheduler.queued_relocations:
        running = list(scheduler.running)
        slots = [sequence.slot for sequence in running] + list(scheduler.manager.slots.free_slots())
        moves = dict(zip((sequence.request_id for sequence in running), rng.sample(slots, len(running))))
        scheduler.relocate(moves)
    if rng.random() < scenario.reorder:
        rng.shuffle(scheduler.running)


def check_outcome(scenario: Scenario, request: Request, result, expected) -> None:
    """A request ended as an uninterrupted run, a cancellation or a refusal ends it, with that run's tokens."""
    what = f"seed {scenario.seed} request {request.request_id}"
    prompt = len(request.prompt)
    if prompt > scenario.config.max_model_len:
        assert result.reason.startswith("unschedulable: the prompt has"), what
        assert not result.tokens, what
        return
    wanted = tuple(expected(request, max(len(result.tokens), 1)))
    assert result.tokens == wanted[: len(result.tokens)], f"{what}: {result.tokens} is not {wanted}"
    if result.reason == "aborted":
        assert request.abort is not None, what
        return
    if result.reason.startswith("unschedulable"):
        block = scenario.config.kv_cache_block_size
        unsplit = not scenario.config.enable_chunked_prefill and prompt > scenario.config.max_num_batched_tokens
        assert unsplit or prompt + len(result.tokens) > scenario.num_pages * block, f"{what}: {result.reason}"
        return
    assert result.reason == _first_stop(scenario, request, result.tokens), f"{what}: {result.reason}"


def _first_stop(scenario: Scenario, request: Request, tokens: Sequence[int]) -> str | None:
    """The reason at the last token, None when an earlier token should have stopped the request."""
    sampling = request.sampling
    room = max(scenario.config.max_model_len - len(request.prompt), 1)
    for count in range(1, len(tokens) + 1):
        token = tokens[count - 1]
        reason = None
        if token in scenario.view.eos_token_ids and not sampling.ignore_eos:
            reason = "eos"
        elif token in sampling.stop_token_ids:
            reason = f"stop_{token}"
        elif any(tuple(tokens[max(0, count - len(stop)) : count]) == stop for stop in sampling.stop_sequences):
            reason = "stop_sequence"
        elif count == min(sampling.max_tokens, room):
            reason = "max_tokens"
        if reason is not None:
            return reason if count == len(tokens) else None
    return None
