"""Dynamic verification: what a profile chooses, from the command that measures it to the engine that uses it."""

import dataclasses
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from scheduler.sequence import Sequence
from tests.acceptance.model import SHALLOW, VOCABULARY, write_checkpoint
from v41jax.cli import app
from v41jax.confidence_profile import Identity, Profile, ProfileError
from v41jax.dspark import DraftBlock
from v41jax.engine_drafts import EngineDrafts
from v41jax.server.metrics import Metrics

OPTIONS = [
    *("--dtype", "float32", "--no-activation-quantization", "--vision", "off"),
    *("--kv-cache-block-size", "32", "--max-num-batched-tokens", "64", "--max-num-seqs", "2", "--decode-buckets", "2"),
    *("--max-model-len", "128", "--num-pages", "12"),
    *("--no-encoder-swa-bounded-replay", "--no-decoder-swa-bounded-replay"),
]
DRAFTS = ["--speculative-method", "dspark", "--num-speculative-tokens", "5"]
RATES = (100, 100, 100, 98, 95, 90, 84, 78, 72, 66, 60, 55, 50)


class Scheduling:
    """What drafts ask of a scheduler."""

    def __init__(self, *names):
        self.geometry = SimpleNamespace(speculative_tokens=5)
        self.sequences = {name: Sequence(name, [1, 2]) for name in names}
        self.verify_lengths = None
        self.sequence = self.sequences.get

    def propose(self, request_id, generation, tokens):
        taken = request_id in self.sequences and self.sequences[request_id].generation == generation
        if taken:
            self.sequences[request_id].drafts = tuple(tokens)
        return taken


def profile(rates=RATES):
    identity = Identity(*["x"] * len(dataclasses.fields(Identity)))
    return Profile(identity, 5, 2, tuple(rates), (1.0,) * 5, {})


def drafted(confidences, generations=(0, 0)):
    """Drafts of requests "a" and "b" whose block has just been drafted with these confidences."""
    scheduler = Scheduling("a", "b")
    tokens = jnp.arange(10).reshape(2, 5)
    logits = jnp.asarray(np.log(confidences) - np.log1p(-np.asarray(confidences)))
    runner = SimpleNamespace(confidence=True, draft=lambda *_: DraftBlock(tokens, logits))
    drafts = EngineDrafts(scheduler, runner, profile())
    sampling = SimpleNamespace(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=None)
    batch = SimpleNamespace(
        output_requests=np.arange(2),
        sampling=(sampling, sampling),
        slots=np.arange(2),
        request_ids=("a", "b"),
        generations=generations,
    )
    batch.shards = (batch,)
    drafts.draft(batch, SimpleNamespace(draft_requests=(1, 2, 4)))
    drafts.deliver()
    return scheduler, drafts


def test_the_published_example_in_any_batch_order():
    scheduler, _ = drafted([[0.9, 0.8, 0.7, 0.6, 0.5], [0.5, 0.5, 0.4, 0.3, 0.2]])
    first, second = scheduler.sequences.values()
    assert (first.drafts, second.drafts) == ((0, 1, 2, 3, 4), (5, 6, 7, 8, 9))
    assert list(scheduler.verify_lengths([first, second], [5, 5])) == [3, 1]
    assert list(scheduler.verify_lengths([second, first], [5, 5])) == [1, 3]
    assert list(scheduler.verify_lengths([first, second], [2, 0])) == [2, 0]
    assert list(scheduler.verify_lengths([], [])) == []


def test_a_draft_of_another_generation_is_dropped():
    scheduler, _ = drafted([[0.9] * 5, [0.5] * 5], generations=(0, 7))
    assert scheduler.sequences["a"].drafts and not scheduler.sequences["b"].drafts


def run(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    directory = tmp_path_factory.mktemp("profile")
    write_checkpoint(directory / "model", **SHALLOW)
    rng = np.random.default_rng(4)
    lines = [{"tokens": rng.integers(3, VOCABULARY - 10, length).tolist()} for length in (9, 20, 31)]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = ["--model", directory / "model", "--prompts", directory / "prompts.jsonl", "--max-tokens", 12]
    [report] = run("calibrate", *OPTIONS, *DRAFTS, *common, "--out", directory / "profile.json")
    return directory, common, report


def test_the_measured_profile_serves_and_changes_no_token(measured):
    directory, common, report = measured
    found = Profile.read(directory / "profile.json")
    assert (found.draft_width, found.max_num_seqs, len(found.sps_table)) == (5, 2, 13)
    assert report["measured_rows"] == [1, 2, 3, 4, 5, 6, 8, 10, 12] and report["blocks"] > 10
    dynamic = ["--dynamic-verify-lengths", "--calibration-profile", directory / "profile.json"]
    plain, fixed, chosen = (
        [
            line["tokens"]
            for line in run("generate", *OPTIONS, *common, "--ignore-eos", "--json", *options)
            if "tokens" in line
        ]
        for options in ([], DRAFTS, [*DRAFTS, *dynamic])
    )
    assert plain == fixed == chosen and len(plain) == 3


def test_a_profile_of_other_options_is_refused(measured):
    directory, common, _ = measured
    dynamic = [*DRAFTS, "--dynamic-verify-lengths", "--calibration-profile", directory / "profile.json"]
    with pytest.raises(ProfileError) as caught:
        run("generate", *OPTIONS, *common, *dynamic, "--max-num-seqs", 4, "--kernels", "xla")
    for words in ("kernels 'auto', this process has 'xla'", "covers 2 requests, max_num_seqs is 4"):
        assert words in str(caught.value)


def test_metrics_show_acceptance_by_position():
    _, drafts = drafted([[0.5] * 5] * 2)
    drafts.counts.offered += (4, 3, 2, 1, 0)
    drafts.counts.accepted += (3, 1, 0, 0, 0)
    text = Metrics(lambda: {**drafts.statistics(), "rows_saved": 7}).text().decode()
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["v41jax_accepted_draft_tokens_by_position_total", "2"] == 1
    assert values["v41jax_offered_draft_tokens_by_position_total", "1"] == 4
    assert values["v41jax_verified_blocks_by_accepted_length_total", "0"] == 0
    assert values[("v41jax_draft_calls_total",)] == 1 and values[("v41jax_rows_saved_total",)] == 7
