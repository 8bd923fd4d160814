"""Random serving histories under every combination of the replay switches, against the dense oracle."""

import collections
import dataclasses
import random

import numpy as np
import pytest

from checkpoints.load import Checkpoint
from scheduler.buckets import Buckets
from scheduler.model_view import ModelView
from scheduler.runtime_config import EngineConfig, validate_runtime_config
from scheduler.scheduler import Scheduler
from scheduler.sequence import ImageSpan, SamplingParams
from tests.helpers.driver import Driver
from tests.helpers.replay_model import PAGE, write_checkpoint
from tests.helpers.replay_runner import OracleRunner
from v41jax.full_forward import load_model
from v41jax.precision import Precision
from v41jax.reference import ReferenceModel
from v41jax.reference.replay_oracle import ReplayOracle

MAX_LEN = 6 * PAGE
REQUESTS, ROWS = 4, 4 * PAGE
SWITCHES = [(True, True), (True, False), (False, True), (False, False)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "model"
    write_checkpoint(path)
    with load_model(path, Precision(np.float32, activation_quantization=False), max_model_len=MAX_LEN) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def oracle(model):
    with (
        Checkpoint.open(model.checkpoint.directory, scopes=("text",)) as checkpoint,
        ReferenceModel(checkpoint, activation_quantization=False) as reference,
    ):
        yield ReplayOracle(reference)


def make_driver(model, oracle, *, encoder, decoder, num_pages=24, **options):
    """An engine loop over the compiled forward and the oracle; one shape of prefill step and one of decode step."""
    view = ModelView.from_config(model.setup.config)
    config = EngineConfig(
        **{
            "kv_cache_block_size": PAGE,
            "encoder_swa_bounded_replay": encoder,
            "decoder_swa_bounded_replay": decoder,
            "max_num_batched_tokens": ROWS,
            "max_num_seqs": REQUESTS,
            "max_model_len": MAX_LEN,
            "state_checkpoint_interval_tokens": PAGE,
            "dtype": "float32",
            "activation_quantization": False,
            **options,
        }
    )
    validate_runtime_config(config, view)
    geometry = config.geometry(view)
    scheduler = Scheduler(config, view, geometry, num_pages, REQUESTS, deferred=False)
    runner = OracleRunner(model, oracle, geometry, num_pages, REQUESTS)
    driver = Driver(scheduler, runner, compress_ids=model.lookup.hasher.compress)
    pages = (MAX_LEN // PAGE,)
    driver.buckets = Buckets((REQUESTS,), (ROWS,), (REQUESTS,), pages, pages)
    return driver


def play(model, oracle, seed, encoder, decoder):
    """One random history; the runner compares every forward."""
    rng = random.Random(seed)
    vocabulary = model.setup.config.text.vocab_size - 10
    driver = make_driver(
        model,
        oracle,
        encoder=encoder,
        decoder=decoder,
        num_pages=rng.choice((12, 18, 24)),
        max_num_batched_tokens=rng.choice((2 * PAGE, 2 * PAGE + 17, ROWS)),
    )
    base = [rng.randrange(3, vocabulary) for _ in range(MAX_LEN)]
    image = ImageSpan(rng.randint(2 * PAGE - 20, 2 * PAGE), rng.randint(5, 24), bytes([rng.randrange(256)] * 4))
    arrivals = collections.defaultdict(list)
    for request in range(6):
        # Prefixes that end at, just before and just after a boundary; suffixes down to one token.
        shared = PAGE * rng.randint(0, 3) + rng.choice((0, 0, -1, 1, rng.randrange(PAGE)))
        prompt = base[: max(shared, 0)] + [rng.randrange(3, vocabulary) for _ in range(rng.choice((1, 2, 9, 40)))]
        images = ()
        if image.start + image.length <= shared and rng.random() < 0.5:
            prompt[image.start : image.start + image.length] = [250] * image.length
            images = (image,)
        sampling = SamplingParams(max_tokens=rng.choice((1, 2, 5)), ignore_eos=True)
        arrivals[0 if request < 2 else rng.randint(1, 14)].append((request, prompt, sampling, images))
    rules = driver.scheduler.rules
    for step in range(200):
        for arrival in arrivals.pop(step, ()):
            driver.add(*arrival)
        if not arrivals and not driver.scheduler.has_work:
            break
        driver.scheduler.rules = dataclasses.replace(rules, cap=rng.choice((0, 3, 7, 33, 64, rng.randint(1, 70))))
        if driver.scheduler.running and rng.random() < 0.08:
            driver.scheduler.preempt(rng.choice(driver.scheduler.running).request_id)
        driver.step()
    driver.checker.drained()
    assert len(driver.finished) == 6
    return driver.runner


@pytest.mark.parametrize(("encoder", "decoder"), SWITCHES)
def test_every_forward_equals_the_oracle(model, oracle, encoder, decoder):
    counts = collections.Counter()
    for seed in range(3):
        counts += play(model, oracle, seed, encoder, decoder).counts
    print(counts)
