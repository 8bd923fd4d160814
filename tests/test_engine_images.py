"""Images through the engine: any chunking, any company, any interruption gives the tokens of a prompt run alone."""

import asyncio
import dataclasses

import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.load import Checkpoint, available_scopes
from checkpoints.synthesize import synthesize
from scheduler.batch import DEAD
from scheduler.buckets import Buckets
from scheduler.model_view import ModelView
from scheduler.runtime_config import EngineConfig, RuntimeConfigError, validate_runtime_config
from scheduler.scheduled_batch import Phase
from scheduler.scheduler import Scheduler
from scheduler.sequence import SamplingParams
from tests.helpers import models
from tests.helpers.golden import span_embeddings
from tests.vision.builders import encoded, random_image, random_picture
from v41jax.config import ModelConfig
from v41jax.engine import Engine, Prompt
from v41jax.engine_core import EngineCore
from v41jax.engine_images import EngineImages
from v41jax.image_leases import ImageCapacityError
from v41jax.image_planning import ImageError
from v41jax.image_spans import span_token_types
from v41jax.reference.vision import encode_image

NAME = "five-layer"
IMAGE = 500
PAGE = 32
CONFIG = EngineConfig(
    dtype="float32",
    activation_quantization=False,
    kv_cache_block_size=PAGE,
    max_num_batched_tokens=128,
    max_num_seqs=4,
    max_model_len=320,
    decode_buckets=(4,),
    num_pages=40,
    encoder_swa_bounded_replay=False,
    decoder_swa_bounded_replay=False,
)
GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)


class FewShapes(Buckets):
    """One shape of prefill steps without decoder replay, two with it; each is compiled with and without images."""

    def shape(self, batch):
        shape = super().shape(batch)
        if batch.phase is Phase.DECODE:
            return shape
        return shape._replace(outputs=min(shape.outputs, 1) * 4 if batch.decoder_replay else 4)


class Engines:
    """Engines of different options over one runner, so that every test uses the same compiled programs."""

    def __init__(self, base: Engine, config: EngineConfig = CONFIG):
        self.base = base
        self.config = config
        runner = base.core.runner
        self.buckets = FewShapes(
            decode_requests=(4,), prefill_rows=(128,), prefill_requests=(4,), prefill_pages=(10,), decode_pages=(10,)
        )
        with Checkpoint.open(models.directory(NAME)) as checkpoint:
            self.view = ModelView.from_config(checkpoint.config)
        self.runner = runner

    def images(self, capacity: int = 1 << 20) -> EngineImages:
        known = self.base.core.images
        return EngineImages(known._parameters, known._config, known._precision, capacity)

    def __call__(self, capacity: int = 1 << 20, **options) -> Engine:
        """An idle engine: no page is cached, nothing is encoded."""
        config = dataclasses.replace(self.config, **options)
        validate_runtime_config(config, self.view)
        geometry, budget = self.runner.setup.geometry, self.base.budget
        scheduler = Scheduler(config, self.view, geometry, budget.num_pages, budget.num_slots, deferred=True)
        core = EngineCore(scheduler, self.runner, self.buckets, self.base.core._lookup, self.images(capacity))
        return Engine(config, core, None, budget)


@pytest.fixture(scope="module")
def engines():
    with Engine.from_checkpoint(models.directory(NAME), CONFIG, warm_up=False) as base:
        yield Engines(base)


@pytest.fixture(scope="module")
def vision(engines):
    return engines.base.core.images._config.vision


@pytest.fixture(scope="module")
def prompts(engines, vision):
    """Two images with text between; one image over the borders of three pages; text; a short image at the start."""
    rng = np.random.default_rng(5)

    def prompt(length, places, images):
        ids = rng.integers(3, 400, length)
        ids[places] = IMAGE
        return engines.base.prompt_with_images(ids.tolist(), images, GREEDY)

    wide, tall = encoded(random_picture(100, 80)), encoded(random_picture(60, 90, seed=1))
    return [
        prompt(60, [20, 40], [wide, random_image(vision, 5, 7, seed=2)]),
        prompt(50, [30], [tall]),
        Prompt(tuple(rng.integers(3, 400, 70).tolist()), GREEDY),
        prompt(9, [0], [random_image(vision, 4, 4, seed=3)]),
    ]


@pytest.fixture(scope="module")
def alone(engines, prompts):
    return [engines().generate([prompt])[0].tokens for prompt in prompts]


def drain(engine):
    """Steps until idle; the tokens of every request by its id."""
    tokens = {}
    while engine.core.has_work:
        for request_id, delta, _ in engine.step():
            tokens.setdefault(request_id, []).extend(delta.tokens)
    return {request_id: tuple(ids) for request_id, ids in tokens.items()}


def assert_nothing_held(engine):
    statistics = engine.statistics()
    assert statistics["vision_requests"] == statistics["vision_bytes_in_use"] == 0
    assert statistics["running"] == statistics["queue"] == statistics["pages_used"] == 0


# The numbers ------------------------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_the_float64_reference(engines, prompts, alone):
    model = models.reference(NAME)
    config = engines.base.core.runner.setup.config
    with Checkpoint.open(models.directory(NAME), scopes=("vision",)) as checkpoint:
        tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.names}
    delimiters = [np.asarray(tensors[f"image_{part}"], np.float64) for part in ("start", "newline", "end")]
    for prompt, generated in zip(prompts, alone, strict=True):
        ids = np.asarray([*prompt.tokens, *generated], np.int32)
        rows, embeddings = np.zeros(len(ids), bool), None
        if prompt.images is not None:
            rows[: len(prompt.tokens)] = prompt.images.prompt.image_mask
            embeddings = np.concatenate(
                [
                    span_embeddings(
                        span_token_types(image.grid),
                        encode_image(
                            tensors, image.patches, image.grid.patch_rows, image.grid.patch_columns, config.vision
                        ),
                        *delimiters,
                    )
                    for image in prompt.images.images
                ]
            )
        logits = np.asarray(model.forward(ids, rows, embeddings, record=False).logits)
        assert logits[len(prompt.tokens) - 1 : -1].argmax(axis=1).tolist() == list(generated)


@pytest.mark.parametrize("size", [1, 63])
def test_chunks_of_any_size_give_the_tokens_of_a_whole_prompt(engines, prompts, alone, size):
    engine = engines(max_num_batched_tokens=size, enable_prefix_caching=False)
    chosen = (0, 1, 3) if size == 63 else (1, 3)
    for index in chosen:
        assert engine.generate([prompts[index]])[0].tokens == alone[index]
    steps = engine.statistics()["prefill_steps"]
    assert steps == sum(-(-len(prompts[index].tokens) // size) for index in chosen)
    assert engine.core.images.encoded == sum(len(prompts[index].images.images) for index in chosen)
    assert_nothing_held(engine)


def test_text_and_images_together_give_each_what_it_gets_alone(engines, prompts, alone):
    engine = engines()
    staggered = [dataclasses.replace(prompt, arrival_step=index) for index, prompt in enumerate(prompts)]
    assert [result.tokens for result in engine.generate(staggered)] == alone
    assert_nothing_held(engine)


def test_a_stream_gives_what_generate_gives_and_releases_the_images(engines, prompts, alone):
    engine = engines()

    async def collect(prompt):
        return [delta async for delta in engine.stream(prompt)]

    async def everything():
        endless = dataclasses.replace(prompts[1], sampling=dataclasses.replace(GREEDY, max_tokens=100))
        stream = engine.stream(endless)
        await anext(stream)
        await stream.aclose()
        return await asyncio.gather(*map(collect, prompts))

    for deltas, expected in zip(asyncio.run(everything()), alone, strict=True):
        assert tuple(token for delta in deltas for token in delta.tokens) == expected
    engine.close()
    assert_nothing_held(engine)


def test_the_placeholder_is_never_drawn(engines, prompts):
    biased = dataclasses.replace(GREEDY, logit_bias=((IMAGE, 1000.0),))
    (result,) = engines().generate([dataclasses.replace(prompts[3], sampling=biased)])
    assert len(result.tokens) == 5 and IMAGE not in result.tokens


@pytest.fixture(scope="module")
def packed():
    """Engines with packed rows, FP8 windows and FP4 index keys in the released precision."""
    quantized = {"kv_cache_dtype": "fp4", "index_cache_dtype": "fp4", "activation_quantization": True}
    config = dataclasses.replace(CONFIG, dtype="bfloat16", **quantized)
    with Engine.from_checkpoint(models.directory(NAME), config, warm_up=False) as base:
        yield Engines(base, config)


def test_packed_pools_hold_images_like_others(packed, prompts):
    """Chunks, company, a preemption and a prefix hit give the tokens of a whole prompt alone."""
    assert packed.runner.setup.geometry.main_format == "fp4"
    alone = [packed().generate([prompt])[0].tokens for prompt in prompts]
    in_chunks = packed(max_num_batched_tokens=63, enable_prefix_caching=False)
    assert in_chunks.generate([prompts[1]])[0].tokens == alone[1]
    engine = packed()
    assert [result.tokens for result in engine.generate(prompts)] == alone
    again = engine.generate([prompts[1]])[0]
    assert again.tokens == alone[1] and again.cached_tokens == (len(prompts[1].tokens) - 1) // PAGE * PAGE > 0
    request_id = engine.submit(prompts[3])
    engine.step()
    assert engine.core.scheduler.preempt(request_id)
    assert drain(engine)[request_id] == alone[3]
    assert_nothing_held(engine)


# Interruptions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5], ids=["as the span begins", "inside the span", "while decoding"])
def test_a_preempted_request_keeps_its_images_and_its_tokens(engines, prompts, alone, steps):
    engine = engines(max_num_batched_tokens=32, enable_prefix_caching=False)
    request_id = engine.submit(prompts[1])
    collected = []
    for _ in range(steps):
        collected += [token for _, delta, _ in engine.step() for token in delta.tokens]
    assert engine.core.scheduler.preempt(request_id)
    assert engine.core.images.leases.requests == {request_id}
    rest = drain(engine)
    assert (*collected, *rest[request_id]) == alone[1]
    assert engine.core.images.encoded == 1
    assert_nothing_held(engine)


@pytest.mark.parametrize("steps", [0, 2, 5], ids=["waiting", "in prefill", "while decoding"])
def test_a_cancelled_request_releases_its_images_and_leaves_its_neighbour(engines, prompts, alone, steps):
    engine = engines(max_num_batched_tokens=32)
    cancelled, kept = engine.submit(prompts[1]), engine.submit(prompts[1])
    collected = {cancelled: [], kept: []}
    for _ in range(steps):
        for request_id, delta, _ in engine.step():
            collected[request_id] += delta.tokens
    engine.abort(cancelled)
    rest = drain(engine)
    assert (*collected[kept], *rest[kept]) == alone[1]
    assert engine.core.images.encoded == 1
    assert_nothing_held(engine)


def test_choices_of_one_prompt_share_one_encoding(engines, prompts, alone):
    engine = engines()
    results = engine.generate([prompts[0]] * 3)
    assert [result.tokens for result in results] == [alone[0]] * 3
    assert engine.core.images.encoded == len(prompts[0].images.images)


def test_requests_wait_for_room_and_impossible_ones_are_refused(engines, prompts, alone):
    cost = max(prompts[1].images.images[0].patches.nbytes, prompts[1].images.spans[0].length * 128 * 4)
    engine = engines(capacity=cost + 100)
    assert [result.tokens for result in engine.generate([prompts[1], prompts[3], prompts[2]])] == [
        alone[1],
        alone[3],
        alone[2],
    ]
    assert_nothing_held(engine)
    with pytest.raises(ImageCapacityError) as caught:
        engines(capacity=100).submit(prompts[1])
    assert caught.value.permanent


# Prefixes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replay", [False, True], ids=["images of states", "bounded replay"])
def test_a_prefix_hit_over_an_image_never_encodes_it(engines, prompts, alone, replay):
    engine = engines(encoder_swa_bounded_replay=replay)
    first = engine.generate([prompts[0]])[0]
    engine.core.images = engines.images()
    second = engine.generate([prompts[0]])[0]
    assert first.tokens == second.tokens == alone[0]
    assert (first.cached_tokens, second.cached_tokens) == (0, 96)
    wide, _ = prompts[0].images.spans
    assert wide.start + wide.length <= 96
    statistics = engine.statistics()
    assert (statistics["prompt_images"], statistics["hit_images"]) == (4, 1)
    # A replay reads the rows below the hit again, the tail of the wide image among them.
    assert statistics["vision_encoded"] == (2 if replay else 1)


@pytest.mark.parametrize("decoder", [False, True], ids=["every row", "decoder tail"])
def test_a25_a_replay_that_starts_inside_a_span_sees_a_dead_history(engines, prompts, decoder):
    """Runtime specification, scenario A25: spans across chunks and across the replay start."""
    options = {"encoder_swa_bounded_replay": True, "decoder_swa_bounded_replay": decoder}
    options["long_prefill_token_threshold"] = PAGE
    later = dataclasses.replace(prompts[0], tokens=(*prompts[0].tokens[:-9], *[7] * 9))
    span, last = prompts[0].images.spans
    assert 96 < last.start + last.length <= len(later.tokens) - 9
    cold = engines(**options).generate([later])[0]
    engine = engines(**options)
    engine.generate([prompts[0]])
    batches = record_batches(engine)
    warm = engine.generate([later])[0]
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 96)
    assert warm.tokens == cold.tokens
    replayed = batches[0]
    assert replayed.starts.tolist() == [64] and span.start < 64 - 3 and span.start + span.length > 64
    assert replayed.history.tolist() == [[DEAD] * 3]
    assert replayed.image_rows[: span.start + span.length - 64].all()


@pytest.mark.parametrize("replay", [False, True], ids=["images of states", "bounded replay"])
def test_equal_ids_with_another_image_share_the_text_before_it_and_nothing_else(engines, prompts, vision, replay):
    engine = engines(encoder_swa_bounded_replay=replay, state_checkpoint_interval_tokens=PAGE)
    rng = np.random.default_rng(9)
    ids = rng.integers(3, 400, 80)
    ids[[10, 60]] = IMAGE

    def prompt(first, second):
        images = [random_image(vision, 5, 7, seed=first), random_image(vision, 5, 7, seed=second)]
        return engine.prompt_with_images(ids.tolist(), images, GREEDY)

    one, same, other_last, other_first = prompt(1, 2), prompt(1, 2), prompt(1, 3), prompt(2, 2)
    assert one.tokens == same.tokens == other_last.tokens == other_first.tokens
    results = [engine.generate([each])[0] for each in (one, same, other_last, other_first)]
    assert [result.cached_tokens for result in results] == [0, 96, 64, 0]
    assert results[0].tokens == results[1].tokens
    for each, result in zip((other_last, other_first), results[2:], strict=True):
        assert result.tokens == engines(enable_prefix_caching=False).generate([each])[0].tokens


def test_a_short_last_chunk_backs_off_into_a_span(engines, vision):
    """Decoder replay wants a whole window in the last forward: it recomputes image rows and their dead history."""
    image = encoded(random_picture(100, 80))
    prompt = engines.base.prompt_with_images([5, 6, 7, 8, 9, 10, 11, 12, IMAGE, 13, 14], [image], GREEDY)
    (span,) = prompt.images.spans
    assert (span.start, span.start + span.length, len(prompt.tokens)) == (8, 64, 66)
    options = {"decoder_swa_bounded_replay": True, "encoder_swa_bounded_replay": True}
    whole = engines(**options).generate([prompt])[0].tokens
    engine = engines(**options, max_num_batched_tokens=64)
    batches = record_batches(engine)
    assert engine.generate([prompt])[0].tokens == whole
    assert [batch.starts.tolist() for batch in batches[:2]] == [[0], [32]]
    assert batches[1].history.tolist() == [[DEAD] * 3] and batches[1].image_rows.sum() == 32
    assert engine.core.images.encoded == 1


def test_an_image_of_one_window_needs_no_other_decoder_rows(engines, vision):
    """Then the decoder's tail is the whole prompt, and its rows must still be routed as image rows."""
    prompt = engines.base.prompt_with_images([IMAGE], [random_image(vision, 4, 4, seed=6)], GREEDY)
    assert len(prompt.tokens) == vision.downsample_ratio**2 - 1 == engines.view.window_size
    tail = engines(decoder_swa_bounded_replay=True).generate([prompt])[0].tokens
    assert tail == engines().generate([prompt])[0].tokens


def record_batches(engine):
    """The batches of every later step."""
    batches, schedule = [], engine.core.scheduler.schedule

    def recorded():
        batch = schedule()
        if batch is not None:
            batches.append(batch)
        return batch

    engine.core.scheduler.schedule = recorded
    return batches


# Refusals ---------------------------------------------------------------------------------------------------


def test_prompts_that_do_not_fit_their_images_are_errors(engines, vision):
    engine = engines()
    image = random_image(vision, 5, 7)
    with pytest.raises(ImageError, match="2 image placeholders and 1 images"):
        engine.prompt_with_images([5, IMAGE, IMAGE], [image])
    with pytest.raises(ImageError, match="image 1: the data is no readable image"):
        engine.prompt_with_images([5, IMAGE, IMAGE], [image, b"no image"])
    with pytest.raises(ValueError, match="prompt_with_images"):
        engine.submit(Prompt((5, IMAGE, 6)))
    whole = engine.prompt_with_images([5, IMAGE, 6], [image])
    with pytest.raises(ValueError, match="prompt_with_images"):
        engine.submit(dataclasses.replace(whole, tokens=(6, *whole.tokens[:-1])))
    assert_nothing_held(engine)


def test_a_prompt_that_its_images_make_too_long_is_refused_before_a_pixel_is_decoded(engines, monkeypatch):
    monkeypatch.setattr("v41jax.engine_images.process_image", lambda *_: pytest.fail("decoded"))
    picture = encoded(random_picture(100, 80))
    with pytest.raises(ImageError, match=r"341 tokens, 336 of them for images; at most 320"):
        engines().prompt_with_images([5] * 5 + [IMAGE] * 6, [picture] * 6)


def test_a_checkpoint_without_vision_serves_text_and_refuses_images(tmp_path):
    directory = tmp_path / "text"
    synthesize(directory, ModelConfig.from_file(models.directory(NAME) / "config.json"), seed=7, scopes=("text",))
    assert available_scopes(directory) == {"text"}
    config = EngineConfig(max_model_len=256, num_pages=8, max_num_seqs=2)
    with Engine.from_checkpoint(directory, config, warm_up=False) as engine:
        assert engine.core.images is None
        with pytest.raises(ImageError, match="accepts no images"):
            engine.prompt_with_images([5], [])
    with pytest.raises(CheckpointError, match=r"vision\.norm\.weight: missing"):
        Engine.from_checkpoint(directory, dataclasses.replace(config, vision="on"), warm_up=False)


def test_the_vision_scope_stays_closed_when_it_is_not_wanted(engines, prompts):
    config = dataclasses.replace(CONFIG, vision="off")
    with (
        Engine.from_checkpoint(models.directory(NAME), config, warm_up=False) as engine,
        pytest.raises(ImageError, match="accepts no images"),
    ):
        engine.submit(prompts[1])
    with pytest.raises(RuntimeConfigError, match="vision 'perhaps'"):
        validate_runtime_config(dataclasses.replace(CONFIG, vision="perhaps"), engines.view)


# Drafts -----------------------------------------------------------------------------------------------------


def test_image_requests_with_drafts_give_the_same_tokens(engines, prompts, alone):
    config = dataclasses.replace(CONFIG, speculative_method="dspark", num_speculative_tokens=5)
    with Engine.from_checkpoint(models.directory(NAME), config, warm_up=False) as engine:
        engine.core.buckets = dataclasses.replace(engines.buckets, verify_rows=engine.core.buckets.verify_rows)
        assert [result.tokens for result in engine.generate(prompts)] == alone
        assert engine.statistics()["verified_blocks"] > 0
        assert_nothing_held(engine)
