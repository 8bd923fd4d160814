"""The engine from a checkpoint directory to tokens: alone, batched, streamed, aborted, refused."""

import asyncio
import dataclasses
import functools
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler.pool_geometry import GeometryError
from scheduler.runtime_config import EngineConfig, RuntimeConfigError
from scheduler.sequence import SamplingParams
from tests.helpers.golden import GOLDEN, load_expected
from v41jax import engine_thread
from v41jax.engine import Engine
from v41jax.engine_core import EngineFailedError, StepFailedError
from v41jax.engine_requests import LiveRequest, Prompt
from v41jax.engine_thread import REFUSED_STEPS
from v41jax.full_forward import full_forward, load_model
from v41jax.parameters import Leaf
from v41jax.precision import Precision

CHECKPOINT = GOLDEN / "five-layer"
CONFIG = EngineConfig(
    dtype="float32",
    activation_quantization=False,
    kv_cache_block_size=32,
    max_num_batched_tokens=128,
    max_num_seqs=4,
    max_model_len=320,
    decode_buckets=(4,),
    num_pages=40,
    encoder_swa_bounded_replay=False,
    decoder_swa_bounded_replay=False,
    vision="off",
)
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    with Engine.from_checkpoint(CHECKPOINT, CONFIG, warm_up=False) as engine:
        yield engine


@pytest.fixture
def own_engine():
    """For a test that ends it."""
    with Engine.from_checkpoint(CHECKPOINT, CONFIG, warm_up=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts():
    expected = load_expected("five-layer")
    return [Prompt(tuple(expected[f"prompt{index}"].tolist()), GREEDY) for index in (1, 2, 3, 4)]


@pytest.fixture(scope="module")
def alone(engine, prompts):
    return [engine.generate([prompt])[0].tokens for prompt in prompts]


def test_a_cpu_widens_its_weights_at_load(engine):
    assert engine.weights == "dequantized"
    assert not any(leaf.dtype in (np.uint8, np.uint16) for leaf in jax.tree.leaves(engine.core.runner.params))


def test_pages_that_do_not_fit_are_refused_before_a_weight_is_read(monkeypatch):
    monkeypatch.setattr(Leaf, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(GeometryError, match=r"num_pages 1000000000 of .* lower num_pages"):
        Engine.from_checkpoint(CHECKPOINT, EngineConfig(num_pages=10**9), warm_up=False)


def test_greedy_tokens_are_those_of_full_forwards(alone, prompts):
    precision = Precision(activation_dtype=jnp.float32, activation_quantization=False)
    with load_model(CHECKPOINT, precision, max_model_len=320) as model:
        for prompt, generated in zip(prompts, alone, strict=True):
            tokens = np.asarray([*prompt.tokens, *generated], np.int32)
            logits = full_forward(model.params, tokens, model.setup, model.lookup)
            start = len(prompt.tokens) - 1
            assert logits[start:-1].argmax(axis=1).tolist() == list(generated)


def test_a_batch_gives_each_request_the_tokens_it_gets_alone(engine, prompts, alone):
    staggered = [dataclasses.replace(prompt, arrival_step=2 * index) for index, prompt in enumerate(prompts)]
    assert [result.tokens for result in engine.generate(staggered)] == alone
    assert [result.tokens for result in engine.generate(prompts[::-1])] == alone[::-1]


def test_a_second_submission_reuses_every_full_page_but_the_last(engine):
    tokens = tuple(np.random.default_rng(3).integers(3, 400, 100).tolist())
    first, second = (engine.generate([Prompt(tokens, GREEDY)])[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    assert first.tokens == second.tokens


def test_statistics_say_how_many_rows_each_part_of_the_model_ran(engine):
    before = engine.statistics()
    engine.generate([Prompt(tuple(range(100, 120)), dataclasses.replace(GREEDY, max_tokens=2))])
    after = engine.statistics()
    for part in ("encoder", "published", "decoder", "last"):
        assert after[f"{part}_rows"] - before[f"{part}_rows"] == 20 + 1
        # A prefill bucket of 128 rows and a decode bucket of 4.
        assert after[f"computed_{part}_rows"] - before[f"computed_{part}_rows"] == 128 + 4


def test_sampling_depends_on_the_seed_alone(engine, prompts):
    drawn = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=11)
    request = dataclasses.replace(prompts[1], sampling=drawn)
    single = engine.generate([request])[0].tokens
    together = engine.generate([prompts[2], request, prompts[3]])
    assert together[1].tokens == single
    other = engine.generate([dataclasses.replace(request, sampling=dataclasses.replace(drawn, seed=12))])[0]
    assert other.tokens != single


def test_nothing_is_left_when_nothing_runs(engine, prompts):
    (expired,) = engine.generate([dataclasses.replace(prompts[0], timeout_s=0.0)])
    assert expired.finish_reason == "timeout"
    statistics = engine.statistics()
    assert statistics["running"] == statistics["queue"] == statistics["pages_used"] == 0
    assert statistics["slots_free"] == CONFIG.max_num_seqs


class FailingOnce:
    """Calls `work`, but for one call, in place of which an exception is raised."""

    def __init__(self, work, after, error=None):
        self.work, self.left = work, after
        self.error = error or OSError("no such table")

    def __call__(self, *arguments, **options):
        self.left -= 1
        if self.left == -1:
            raise self.error
        return self.work(*arguments, **options)


@pytest.mark.parametrize("after", [0, 1, 3, 5])
@pytest.mark.parametrize("part", ["lookup", "prepare"])
def test_requests_after_a_step_that_was_refused_get_their_tokens(engine, prompts, alone, monkeypatch, part, after):
    if part == "lookup":
        lookup = engine.core._lookup
        monkeypatch.setattr(lookup, "step_rows", FailingOnce(lookup.step_rows, after))
    else:
        programs = engine.core.runner._compiled
        prepare = FailingOnce(lambda program, *given: program.prepare(*given), after)
        for key, program in programs.items():
            patched = dataclasses.replace(program, prepare=functools.partial(prepare, program))
            monkeypatch.setitem(programs, key, patched)
    staggered = [dataclasses.replace(prompt, arrival_step=index) for index, prompt in enumerate(prompts)]
    before = engine.statistics()["failed"]
    with pytest.raises(StepFailedError, match="no such table") as caught:
        engine.generate(staggered)
    assert caught.value.recoverable
    statistics = engine.statistics()
    assert statistics["live"] == statistics["pages_used"] == 0
    assert statistics["failed"] - before == len(caught.value.outputs) == min(after + 1, 4)
    assert [result.tokens for result in engine.generate(staggered)] == alone


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_prefix_is_still_a_hit_after_a_step_that_was_refused(engine, monkeypatch, after):
    """The refused steps are those of a request that hits it: of its restore, or behind that."""
    prompt = Prompt(tuple(np.random.default_rng(10 + after).integers(3, 400, 100).tolist()), GREEDY)
    cold = engine.generate([prompt])[0]
    with monkeypatch.context() as patch:
        lookup = engine.core._lookup
        patch.setattr(lookup, "step_rows", FailingOnce(lookup.step_rows, after))
        with pytest.raises(StepFailedError):
            engine.generate([prompt])
    hit = engine.generate([prompt])[0]
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 96)
    assert hit.tokens == cold.tokens


def test_an_image_that_a_refused_step_was_to_store_is_no_hit(engine, monkeypatch):
    prompt = Prompt(tuple(np.random.default_rng(20).integers(3, 400, 100).tolist()), GREEDY)
    with monkeypatch.context() as patch:
        lookup = engine.core._lookup
        patch.setattr(lookup, "step_rows", FailingOnce(lookup.step_rows, 1))
        with pytest.raises(StepFailedError):
            engine.generate([prompt])
    cold, hit = (engine.generate([prompt])[0] for _ in range(2))
    assert (cold.cached_tokens, hit.cached_tokens) == (0, 96)
    assert hit.tokens == cold.tokens


def assert_ended(engine, prompt, cause):
    """Everything that would submit or step says what ended the engine."""

    async def stream():
        return [delta async for delta in engine.stream(prompt)]

    assert engine.failure is cause
    calls = (
        engine.step,
        engine.core.step,
        lambda: engine.submit(prompt),
        lambda: engine.generate([prompt]),
        lambda: asyncio.run(stream()),
    )
    for call in calls:
        with pytest.raises(EngineFailedError, match="no such table") as caught:
            call()
        assert caught.value.__cause__ is cause


def test_a_refused_step_ends_a_process_that_has_told_the_others_to_end(own_engine, prompts, monkeypatch):
    told = []
    monkeypatch.setattr(own_engine, "_followers", types.SimpleNamespace(fail=told.append))
    lookup = own_engine.core._lookup
    monkeypatch.setattr(lookup, "step_rows", FailingOnce(lookup.step_rows, 0))
    with pytest.raises(StepFailedError) as caught:
        own_engine.generate(prompts)
    assert len(told) == 1 and "no such table" in told[0]
    assert not caught.value.recoverable
    assert_ended(own_engine, prompts[0], caught.value.__cause__)


@pytest.mark.parametrize("part", ["schedule", "_read"])
def test_a_step_that_fails_in_its_plan_or_its_results_ends_the_engine(own_engine, prompts, monkeypatch, part):
    holder = own_engine.core.scheduler if part == "schedule" else own_engine.core
    monkeypatch.setattr(holder, part, FailingOnce(getattr(holder, part), 0))
    with pytest.raises(StepFailedError) as caught:
        own_engine.generate(prompts)
    assert not caught.value.recoverable
    assert_ended(own_engine, prompts[0], caught.value.__cause__)


@pytest.mark.parametrize("error", [ValueError("no such table"), KeyboardInterrupt("no such table")], ids=repr)
def test_what_leaves_a_step_with_outputs_undelivered_ends_the_engine(own_engine, prompts, monkeypatch, error):
    monkeypatch.setattr(LiveRequest, "take", FailingOnce(None, 0, error))
    with pytest.raises(type(error)):
        own_engine.generate(prompts)
    assert_ended(own_engine, prompts[0], error)


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(engine):
    result = engine.generate([Prompt((5,) * 400, GREEDY)])[0]
    assert result.tokens == ()
    assert "400" in result.finish_reason and "320" in result.finish_reason


def test_unusable_prompts_are_errors(engine):
    with pytest.raises(ValueError, match="512"):
        engine.prompt([1, 512])
    with pytest.raises(ValueError, match="tokenizer"):
        engine.prompt("text")


def test_every_refused_option_is_named_before_a_weight_is_read(tmp_path):
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    config = dataclasses.replace(CONFIG, kv_cache_dtype="int3", kv_cache_block_size=31, speculative_method="dspark")
    with pytest.raises(RuntimeConfigError) as caught:
        Engine.from_checkpoint(tmp_path, config)
    for word in ("int3", "31", "num_speculative_tokens 0"):
        assert any(word in fault for fault in caught.value.faults), (word, caught.value.faults)


def test_warm_up_touches_no_pool_byte_and_covers_what_follows(prompts, alone):
    config = dataclasses.replace(CONFIG, max_num_batched_tokens=128, max_model_len=128, num_pages=8)
    with Engine.from_checkpoint(CHECKPOINT, config, warm_up=True) as engine:
        pools = engine.core.runner.pools
        assert not any(np.asarray(plane).any() for plane in (*pools.main, *pools.index_values, pools.window))
        assert [engine.generate([prompt])[0].tokens for prompt in prompts[:3]] == alone[:3]
        assert engine.statistics()["recompiles_after_warm_up"] == 0
        json.dumps(engine.summary() | engine.statistics())


def test_streams_deliver_what_generate_returns_and_abort_when_closed(prompts, alone):
    with Engine.from_checkpoint(CHECKPOINT, CONFIG, warm_up=False) as engine:

        async def collect(prompt):
            return [delta async for delta in engine.stream(prompt)]

        async def first_delta(prompt):
            stream = engine.stream(prompt)
            async for _ in stream:
                break
            await stream.aclose()

        async def everything():
            endless = dataclasses.replace(prompts[3], sampling=dataclasses.replace(GREEDY, max_tokens=200))
            collected = await asyncio.gather(*map(collect, prompts), first_delta(endless))
            while engine.core.has_work:
                await asyncio.sleep(0.01)
            return collected[:-1]

        for deltas, expected in zip(asyncio.run(everything()), alone, strict=True):
            assert tuple(token for delta in deltas for token in delta.tokens) == expected
            assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
            assert deltas[-1].finish_reason == "max_tokens"
        with pytest.raises(RuntimeError, match="streams"):
            engine.generate(prompts)
        assert engine.statistics()["aborted"] == 1


def test_a_stream_after_a_step_that_was_refused_gets_its_tokens(own_engine, prompts, alone, monkeypatch):
    lookup = own_engine.core._lookup
    monkeypatch.setattr(lookup, "step_rows", FailingOnce(lookup.step_rows, 2))

    async def collect():
        return [token async for delta in own_engine.stream(prompts[0]) for token in delta.tokens]

    with pytest.raises(StepFailedError, match="no such table"):
        asyncio.run(collect())
    assert own_engine.failure is None
    assert asyncio.run(collect()) == list(alone[0])
    monkeypatch.setattr(own_engine.core, "_read", FailingOnce(None, 0))
    with pytest.raises(StepFailedError) as caught:
        asyncio.run(collect())
    assert own_engine.failure is caught.value.__cause__
    with pytest.raises(EngineFailedError):
        asyncio.run(collect())


@pytest.mark.parametrize("after", [0, 1])
def test_steps_refused_in_a_row_end_the_engine_of_streams(own_engine, prompts, alone, monkeypatch, after):
    """The first step of every request, or the one behind it: neither gives a token. One that does begins anew."""
    lookup = own_engine.core._lookup
    step_rows = lookup.step_rows
    monkeypatch.setattr(engine_thread, "REFUSED_SECONDS", 0.0)

    async def collect():
        return [token async for delta in own_engine.stream(prompts[0]) for token in delta.tokens]

    def refused():
        with monkeypatch.context() as patch, pytest.raises(StepFailedError, match="no such table") as caught:
            patch.setattr(lookup, "step_rows", FailingOnce(step_rows, after))
            asyncio.run(collect())
        return caught.value

    for _ in range(2):
        assert all(refused().recoverable for _ in range(REFUSED_STEPS - 1))
        assert own_engine.failure is None
        assert asyncio.run(collect()) == list(alone[0])
    with monkeypatch.context() as patch:
        # A client may send a request again at once, several times.
        patch.setattr(engine_thread, "REFUSED_SECONDS", 1e9)
        assert all(refused().recoverable for _ in range(REFUSED_STEPS + 1))
    assert asyncio.run(collect()) == list(alone[0])
    *others, last = [refused() for _ in range(REFUSED_STEPS)]
    assert all(error.recoverable for error in others) and not last.recoverable
    assert own_engine.failure is last.__cause__
    with pytest.raises(EngineFailedError, match="no such table"):
        asyncio.run(collect())
