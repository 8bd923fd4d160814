"""Bounded replay on the compiled forward: random serving histories against the dense oracle, and its named properties.

All tests but the last two share four programs: prefill without a finishing request, prefill with a tail, prefill of
all rows, decode.
"""

import collections
import dataclasses
import random

import jax
import numpy as np
import pytest

from checkpoints.load import Checkpoint
from scheduler.batch import Preparation
from scheduler.buckets import Buckets
from scheduler.model_view import ModelView
from scheduler.pools import allocate, poison
from scheduler.runtime_config import EngineConfig, validate_runtime_config
from scheduler.scheduler import Scheduler
from scheduler.sequence import ImageSpan, SamplingParams
from tests.helpers.driver import Driver
from tests.helpers.replay_model import BOUNDARY, IMAGE, PAGE, SHORT, WINDOW, write_checkpoint
from tests.helpers.replay_runner import OracleRunner, image_embeddings
from tests.helpers.rounding_flips import FlipProbe, explain
from v41jax.engram_hashing import history_before
from v41jax.full_forward import load_model, step
from v41jax.precision import Precision
from v41jax.reference import ReferenceModel
from v41jax.reference.replay_oracle import ReplayForward, ReplayOracle
from v41jax.row_counts import rows_per_layer
from v41jax.spans import Span, batch_of

MAX_LEN = 6 * PAGE
REQUESTS, ROWS, COLUMNS, PAGES = 4, 4 * PAGE, MAX_LEN // PAGE, 24
HISTORIES = 6
SWITCHES = [(True, True), (True, False), (False, True), (False, False)]
UNQUANTIZED = Precision(np.float32, activation_quantization=False)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "model"
    write_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def model(directory):
    with load_model(directory, UNQUANTIZED, max_model_len=MAX_LEN, index_format="fp8") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def oracle(directory):
    with (
        Checkpoint.open(directory, scopes=("text",)) as checkpoint,
        ReferenceModel(checkpoint, activation_quantization=False) as reference,
    ):
        yield ReplayOracle(reference)


# Random histories --------------------------------------------------------------------------------------------


def make_driver(model, oracle, encoder, decoder, budget):
    """An engine loop over the compiled forward and the oracle; one shape of prefill step and one of decode step."""
    view = ModelView.from_config(model.setup.config)
    config = EngineConfig(
        kv_cache_block_size=PAGE,
        encoder_swa_bounded_replay=encoder,
        decoder_swa_bounded_replay=decoder,
        max_num_batched_tokens=budget,
        max_num_seqs=REQUESTS,
        max_model_len=MAX_LEN,
        state_checkpoint_interval_tokens=PAGE,
        dtype="float32",
        activation_quantization=False,
    )
    validate_runtime_config(config, view)
    geometry = config.geometry(view)
    assert geometry == model.setup.geometry
    scheduler = Scheduler(config, view, geometry, PAGES, REQUESTS, deferred=False)
    runner = OracleRunner(model, oracle, geometry, PAGES, REQUESTS)
    driver = Driver(scheduler, runner, compress_ids=model.lookup.hasher.compress)
    driver.buckets = Buckets((REQUESTS,), (ROWS,), (REQUESTS,), (COLUMNS,), (COLUMNS,))
    return driver


def draw_requests(rng, vocabulary):
    """Step -> requests that arrive before it: prefixes that end at, before and after a boundary, suffixes from 1."""
    base = [rng.randrange(3, vocabulary) for _ in range(MAX_LEN)]
    image = ImageSpan(rng.randint(2 * PAGE - 20, 2 * PAGE), rng.randint(5, 24), bytes([rng.randrange(1, 256)] * 4))
    arrivals = collections.defaultdict(list)
    for request in range(6):
        shared = PAGE * rng.randint(0, 3) + rng.choice((0, 0, -1, 1, rng.randrange(PAGE)))
        if rng.random() < 0.25:
            shared = image.start + image.length  # image rows among the last ones
        prompt = base[: max(shared, 0)] + [rng.randrange(3, vocabulary) for _ in range(rng.choice((1, 2, 9, 40)))]
        images = ()
        if image.start + image.length <= shared and rng.random() < 0.5:
            prompt[image.start : image.start + image.length] = [IMAGE] * image.length
            images = (image,)
        sampling = SamplingParams(max_tokens=rng.choice((1, 2, 5)), ignore_eos=True)
        arrivals[0 if request < 2 else rng.randint(1, 14)].append((request, prompt, sampling, images))
    return arrivals


def play(model, oracle, seed, encoder, decoder):
    """Runs one random history; every forward is compared on the way."""
    rng = random.Random(seed)
    driver = make_driver(model, oracle, encoder, decoder, rng.choice((2 * PAGE, 2 * PAGE + 17, ROWS)))
    arrivals = draw_requests(rng, model.setup.config.text.vocab_size - 10)
    requests = [request for together in arrivals.values() for request in together]
    rules = driver.scheduler.rules
    for number in range(200):
        for request in arrivals.pop(number, ()):
            driver.add(*request)
        if not arrivals and not driver.scheduler.has_work:
            break
        driver.scheduler.rules = dataclasses.replace(rules, cap=rng.choice((0, 3, 7, 33, 64, rng.randint(1, 70))))
        if driver.scheduler.running and rng.random() < 0.08:
            driver.scheduler.preempt(rng.choice(driver.scheduler.running).request_id)
        driver.step()
    driver.checker.drained()
    assert len(driver.finished) == len(requests)
    return driver, requests


@pytest.mark.parametrize(("encoder", "decoder"), SWITCHES)
def test_every_forward_of_a_history_equals_the_oracle(model, oracle, encoder, decoder):
    counts = collections.Counter()
    for seed in range(HISTORIES):
        driver, requests = play(model, oracle, seed, encoder, decoder)
        counts += driver.runner.counts
        layers = model.setup.config.text.num_hidden_layers
        rows = sum(rows_per_layer(batch, WINDOW).layer_rows(layers, BOUNDARY) for batch in driver.log)
        assert rows == driver.runner.oracle_rows.sum()
        if not encoder and not decoder:
            for request in requests:
                check_against_a_cold_run(driver, oracle.model, *request)
    wanted = {"final": 15, "non-final": 15, "mixed": 2, "odd resume": 15, "decode": 20}
    wanted |= {"rebuild": 15} if encoder else {"restored": 10}
    wanted |= {"odd back-off": 2, "even back-off": 3} if decoder else {}
    assert all(counts[kind] >= least for kind, least in wanted.items()), counts


def check_against_a_cold_run(driver, reference, request, prompt, sampling, images):
    """Without any replay hits, chunks and preemptions change nothing: the logits are those of one forward."""
    ids = np.asarray([*prompt, *driver.finished[request].tokens], np.int32)
    rows = ids == IMAGE
    rows[len(prompt) :] = False
    embeddings = image_embeddings(images, 0, len(ids), reference.config.text.hidden_size)
    expected = reference.forward(ids, rows, embeddings[rows], record=False).logits
    given = driver.runner.logits[request]
    assert sorted(given) == list(range(len(prompt) - 1, len(ids) - 1))
    for position, logits in given.items():
        error = np.linalg.norm(logits - expected[position]) / np.linalg.norm(expected[position])
        assert error < 1e-5


# Named properties --------------------------------------------------------------------------------------------


def make_ids(length, seed=0):
    return np.random.default_rng(seed).integers(3, 240, length).astype(np.int32)


def span(model, ids, start, slot, pages, **fields):
    """Rows from `start` on of a request with these ids."""
    compressed = model.lookup.hasher.compress(ids)
    history = history_before(compressed, start, model.setup.geometry.history_size)
    return Span(start, ids[start:], compressed[start:], slot, pages, history, **fields)


def run(model, pools, spans, *, decoder_replay, params=None, **static):
    """One prefill forward in the shape of the histories; the last row of every final span has logits."""
    lengths = np.cumsum([span.length for span in spans])
    finals = [int(end) - 1 for end, item in zip(lengths, spans) if item.is_final]
    batch = batch_of(
        spans,
        model.setup.geometry,
        rows=ROWS,
        requests=REQUESTS,
        columns=COLUMNS,
        output_rows=finals,
        outputs=REQUESTS if finals or not decoder_replay else 0,
        decoder_replay=decoder_replay,
    )
    return step(
        model.params if params is None else params,
        jax.tree.map(np.array, pools),
        batch,
        model.lookup.step_rows(batch),
        setup=model.setup,
        phase="prefill",
        image_embeddings=np.zeros((ROWS, model.setup.config.text.hidden_size), np.float32),
        **static,
    )


def empty_pools(model):
    return poison(allocate(model.setup.geometry, PAGES, REQUESTS))


def close(ours, expected):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(expected), atol=2e-5, rtol=0)


def test_a_prompt_within_one_window_loses_nothing(model):
    """Its tail is the whole prompt: logits, pages and rings are those of the full forward."""
    spans = [span(model, make_ids(length, slot), 0, slot, [slot]) for slot, length in ((2, WINDOW), (0, 5), (3, 1))]
    full_pools, full = run(model, empty_pools(model), spans, decoder_replay=False)
    pools, output = run(model, empty_pools(model), spans, decoder_replay=True)
    close(output.logits[:3], full.logits[:3])
    close(pools.window, full_pools.window)
    for ours, expected in zip(pools.main, full_pools.main):
        close(ours, expected)


@pytest.mark.parametrize("resume", [69, 70])
def test_rows_past_a_back_off_are_those_of_a_plain_resume(model, resume):
    """Pages, encoder rings and tails alike; encoder rings below the resume point keep their bytes."""
    ids, pages = make_ids(resume + 4), [7, 2, 9]
    warm, _ = run(
        model, empty_pools(model), [span(model, ids[:resume], 0, 1, pages, is_final=False)], decoder_replay=True
    )
    resumed, _ = run(model, warm, [span(model, ids, resume, 1, pages)], decoder_replay=True)
    back = {"write_from": resume, "cached_until": resume, "swa_cached_until": resume, "swa_replay_start": PAGE}
    spans = [span(model, ids, PAGE, 1, pages, preparation=Preparation.REWIND, **back)]
    backed_off, _ = run(model, warm, spans, decoder_replay=True)
    for ours, expected in zip((*backed_off.main, *backed_off.index_values), (*resumed.main, *resumed.index_values)):
        close(ours, expected)
    close(backed_off.window[:BOUNDARY, 1], resumed.window[:BOUNDARY, 1])
    close(backed_off.tail_kv[:, 1], resumed.tail_kv[:, 1])
    kept = np.arange(resume + 4 - WINDOW, resume) % WINDOW
    before = np.asarray(warm.window)[:BOUNDARY, 1, kept]
    assert np.asarray(backed_off.window)[:BOUNDARY, 1, kept].tobytes() == before.tobytes()
    assert not np.isnan(backed_off.window[BOUNDARY:, 1]).any()


def test_a_forward_without_a_finishing_request_launches_nothing_past_the_publication(model):
    """It reads no other weight of the decoder, and its program is smaller than one of the full forward."""
    ids = make_ids(60)
    spans = [span(model, ids, 0, 1, [3, 4], is_final=False)]
    pools, output = run(model, empty_pools(model), spans, decoder_replay=True)
    assert output.logits.shape == (0, model.setup.config.text.vocab_size)
    assert (np.asarray(pools.window)[BOUNDARY:, 1] == 0).all()
    spoiled = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), model.params)
    first = BOUNDARY
    kept = model.params.runs[first]
    read = spoiled.runs[first]._replace(attn_norm=kept.attn_norm, compressor=kept.compressor)
    spoiled = model.params._replace(
        runs=(*model.params.runs[:first], read, *spoiled.runs[first + 1 :]), head=spoiled.head, norm=spoiled.norm
    )
    same, _ = run(model, empty_pools(model), spans, decoder_replay=True, params=spoiled)
    assert all(
        np.asarray(ours).tobytes() == np.asarray(expected).tobytes()
        for ours, expected in zip(jax.tree.leaves(same), jax.tree.leaves(pools))
    )


def test_quantized_layers_of_a_tail_agree_with_the_oracle(directory):
    """Every layer on the oracle's rows and windows, from the inputs that the compiled forward gave it.

    A row may depart only by a value that lies within float32 noise of a rounding boundary.
    """
    length = 90
    ids = make_ids(length, 3)
    forward = ReplayForward(0, 0, length, decoder_replay=True)
    probe = FlipProbe()
    with (
        load_model(directory, Precision(np.float32), max_model_len=MAX_LEN, index_format="fp8") as model,
        ReferenceModel(model.checkpoint, index_format="fp8", probe=probe) as reference,
    ):
        oracle = ReplayOracle(reference)
        spans = [span(model, ids, 0, 1, [3, 4, 5])]
        _, output = run(model, empty_pools(model), spans, decoder_replay=True, record=True)
        streams, pre_mix = (np.asarray(part, np.float64)[:, :length] for part in output.record.layers[:2])
        inputs, memory = reference.begin(ids)
        entering = reference.first_streams(inputs)
        ran = []
        for layer in range(len(streams)):
            visibility = oracle.visibility(forward, layer)
            rows = np.flatnonzero(visibility.query_rows)
            given = streams[layer, rows].reshape(rows.size, -1)

            def leading(count, layer=layer, entering=entering, visibility=visibility, rows=rows):
                result = reference.run_layer(layer, *entering, inputs, memory, visibility)
                return result.streams[rows[:count]].reshape(count, -1)

            flips = explain(probe, leading, given, tolerance=1e-4)
            assert len(flips) <= 3
            ran.append(rows.size)
            assert (np.delete(streams[layer], rows, axis=0) == 0).all()
            entering = tuple(np.full_like(part[layer], np.nan) for part in (streams, pre_mix))
            for table, part in zip(entering, (streams, pre_mix)):
                table[rows] = part[layer, rows]
    assert ran == [length] * BOUNDARY + [WINDOW] * 4 + [1]


def test_the_draft_taps_the_rows_of_the_tail(tmp_path):
    """Features exist where the decoder ran: all rows of a short prompt, the last window of a longer one."""
    write_checkpoint(tmp_path / "model", **SHORT)
    with load_model(tmp_path / "model", UNQUANTIZED, max_model_len=MAX_LEN, speculative_tokens=5) as model:
        short, long = make_ids(7), make_ids(40)
        spans = [span(model, long, 0, 0, [0, 1]), span(model, short, 0, 1, [2])]
        _, full = run(model, empty_pools(model), spans, decoder_replay=False)
        _, output = run(model, empty_pools(model), spans, decoder_replay=True)
        _, nothing = run(
            model, empty_pools(model), [span(model, long, 0, 0, [0, 1], is_final=False)], decoder_replay=True
        )
    assert nothing.taps is None
    rows = output.taps.rows
    count = WINDOW + 7
    assert np.asarray(rows.positions)[:count].tolist() == [*range(40 - WINDOW, 40), *range(7)]
    assert np.asarray(rows.batch_ids)[:count].tolist() == [0] * WINDOW + [1] * 7
    assert (np.asarray(rows.batch_ids)[count:] == -1).all()
    assert np.asarray(rows.ring_rows).sum() == count
    close(output.taps.features[WINDOW:count], full.taps.features[40:47])
    hidden = model.setup.config.text.hidden_size
    # What enters the first decoder layer is the encoder's, whose windows are whole.
    close(output.taps.features[:WINDOW, :hidden], full.taps.features[40 - WINDOW : 40, :hidden])
    assert np.abs(output.taps.features[:WINDOW, hidden:] - full.taps.features[40 - WINDOW : 40, hidden:]).max() > 1e-3
