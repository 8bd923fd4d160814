"""Drafting engines end with the tokens of engines that decode token by token (scenario A28).

The draft of a random checkpoint is hardly ever right, so most scenarios replace what it proposes: by a prefix of what
will follow, of a length drawn anew for every block, and wrong tokens after it.
"""

from __future__ import annotations

import collections
import dataclasses
import random

import jax
import numpy as np
import pytest

from scheduler.scheduled_batch import Phase
from scheduler.sequence import SamplingParams
from tests.acceptance.model import PAGE, SHALLOW, VOCABULARY, write_checkpoint
from tests.acceptance.prompts import random_prompt
from tests.acceptance.serving import EXACT, OFF, Serving
from v41jax.full_forward import full_forward

WIDTH = 5
DRAFTS = {"speculative_method": "dspark", "num_speculative_tokens": WIDTH}
SWITCHES = [
    {"encoder_swa_bounded_replay": encoder, "decoder_swa_bounded_replay": decoder}
    for encoder in (False, True)
    for decoder in (False, True)
]
NAMES = ["both off", "decoder", "encoder", "both on"]


class Pair:
    """The same scenario with and without drafts."""

    def __init__(self, checkpoint, **options):
        self.plain = Serving(checkpoint, **options)
        self.drafting = Serving(checkpoint, **options, **DRAFTS)

    def __enter__(self):
        return self

    def __exit__(self, *details):
        self.plain.__exit__(*details)
        self.drafting.__exit__(*details)

    def play(self, scenario, seed=0, proposals=None, known=None, **options):
        """Plays a scenario twice.

        Args:
          scenario: gets a session and drives it to the end.
          seed: of the proposals.
          proposals: (what will follow, random) -> what is proposed; None proposes what is drafted.
          known: tokens of requests beyond what they generate here.
          options: of both sessions.

        Returns:
          The session with drafts.
        """
        plain = self.plain.session(**options)
        scenario(plain)
        drafting = self.drafting.session(**options)
        if proposals is not None:
            rng = random.Random(seed)
            truth = {name: result.tokens for name, result in plain.finished.items()} | (known or {})

            def propose(sequence):
                return proposals(truth[sequence.request_id][sequence.num_output_tokens :], rng)

            drafting.scheduler.proposals = propose
        scenario(drafting)
        assert drafting.finished.keys() == plain.finished.keys()
        for name, result in drafting.finished.items():
            expected = plain.finished[name]
            if result.reason == "aborted":
                shorter, longer = sorted((result.tokens, expected.tokens), key=len)
                assert longer[: len(shorter)] == shorter, name
            else:
                assert (result.tokens, result.reason) == (expected.tokens, expected.reason), name
        return drafting


def mixed(ahead, rng):
    """A draft of any length whose first tokens are right."""
    ahead = list(ahead[: rng.randint(0, WIDTH)])
    right = rng.randint(0, len(ahead))
    return ahead[:right] + [(token + 1) % (VOCABULARY - 10) for token in ahead[right:]]


def exactly(count):
    """Whole drafts of which `count` tokens are right."""

    def proposals(ahead, rng):
        wrong = [VOCABULARY - 11 if token != VOCABULARY - 11 else 3 for token in (*ahead[count:], *(4,) * WIDTH)]
        return [*ahead[:count], *wrong][:WIDTH]

    return proposals


def accepted(session):
    return session.core.drafts.statistics()["accepted_lengths"]


@pytest.fixture(scope="module")
def pair(draft_checkpoint):
    with Pair(draft_checkpoint, **EXACT) as pair:
        yield pair


def batched(session):
    for name, (length, count) in enumerate(((61, 20), (5, 33), (33, 17))):
        session.add(name, random_prompt(length, name), count)
    session.run()


def test_what_the_checkpoints_draft_proposes(pair):
    session = pair.play(batched, **OFF)
    statistics = session.core.drafts.statistics()
    assert statistics["verified_blocks"] > 30 and sum(statistics["offered_by_position"]) > 100


@pytest.mark.parametrize("count", range(WIDTH + 1))
def test_every_accepted_length(pair, count):
    session = pair.play(batched, proposals=exactly(count), **OFF)
    lengths = accepted(session)
    # Only the last blocks of a request are shorter.
    assert lengths[count] > 0.5 * sum(lengths)
    logged = [batch for batch in session.log if batch.phase is Phase.DECODE]
    assert max(int(batch.lengths.max()) for batch in logged) == WIDTH + 1
    assert session.serving.runner.recompiles == 0


@pytest.mark.parametrize("switches", SWITCHES, ids=NAMES)
def test_hits_forks_and_back_offs_under_every_switch(pair, switches):
    def scenario(session):
        prompt = random_prompt(100, 7)
        session.add("cold", prompt, 12)
        session.run()
        for name, suffix in (("left", 0), ("right", 0), ("odd", 5), ("diverged", 40)):
            session.add(name, (*prompt[: 100 - 30 * (suffix == 40)], *random_prompt(suffix, 9)), 15)
        session.run()

    session = pair.play(scenario, proposals=mixed, **switches, long_prefill_token_threshold=2 * PAGE)
    assert session.finished["left"].cached_tokens == 96 and len(accepted(session)) == WIDTH + 1
    assert sum(accepted(session)[1:]) > 3


def test_preempted_cancelled_and_starved(pair):
    def scenario(session):
        for name in range(4):
            session.add(name, random_prompt(45 + 10 * name, 10 + name), 30)
        session.until(lambda: len(session.tokens(1)) >= 3)
        session.scheduler.preempt(1)
        session.steps(3)
        session.scheduler.preempt(0)
        session.until(lambda: len(session.tokens(2)) >= 2)
        session.scheduler.abort(2)
        session.run()

    session = pair.play(scenario, proposals=mixed, **OFF, num_pages=9)
    assert session.scheduler.counters.preemptions >= 2
    assert session.finished[2].reason == "aborted"


def test_a_request_that_ends_between_a_verification_and_its_result(pair):
    """Preempted or cancelled after its step was planned: nothing of the result is kept."""

    def scenario(session):
        for name in ("preempted", "cancelled", "other"):
            session.add(name, random_prompt(40, len(name)), 14)
        session.until(lambda: all(len(session.tokens(name)) >= 2 for name in ("preempted", "cancelled", "other")))
        runner, execute = session.serving.runner, session.serving.runner.execute

        def interrupted(*arguments):
            output = execute(*arguments)
            session.scheduler.preempt("preempted")
            session.scheduler.abort("cancelled")
            return output

        runner.execute = interrupted
        session.step()
        del runner.execute
        session.run()

    session = pair.play(scenario, proposals=mixed, **OFF)
    assert session.scheduler.counters.stale_results >= 2


def test_slots_move_while_drafts_wait(pair):
    def scenario(session):
        for name in range(3):
            session.add(name, random_prompt(25 + 30 * name, 30 + name), 16)
        session.until(lambda: all(session.tokens(name) for name in range(3)))
        first, second, third = (sequence.slot for sequence in session.scheduler.running)
        names = [sequence.request_id for sequence in session.scheduler.running]
        session.scheduler.relocate(dict(zip(names, (second, third, first))))
        session.run()

    pair.play(scenario, proposals=mixed, **OFF)


@pytest.mark.parametrize("place", [0, 1, 3, 5])
def test_stops_inside_an_accepted_block(pair, place):
    """A stop id, a stop sequence and the cap end a request at the same token, and its pages say nothing of the rest."""
    prompt = random_prompt(29, 50)
    probe = pair.plain.session(**OFF)
    probe.add(0, prompt, 40)
    tokens = probe.run()[0].tokens
    at = next(index for index in range(7 + place, 40) if tokens[index] not in tokens[:index])
    end = SamplingParams(max_tokens=40, ignore_eos=True)

    def scenario(session):
        session.add("id", prompt, dataclasses.replace(end, stop_token_ids=(tokens[at],)))
        session.add("sequence", prompt, dataclasses.replace(end, stop_sequences=((tokens[at - 1], tokens[at]),)))
        session.add("cap", prompt, dataclasses.replace(end, max_tokens=at + 1))
        session.run()
        session.add("after", (*prompt, *tokens[: at + 1]), 6)
        session.run()

    # What was accepted goes on beyond the stop.
    session = pair.play(scenario, proposals=exactly(WIDTH), known=dict.fromkeys(("id", "sequence"), tokens), **OFF)
    assert {session.finished[name].tokens for name in ("id", "sequence", "cap")} == {tokens[: at + 1]}
    assert session.finished["id"].reason == f"stop_{tokens[at]}"
    assert accepted(session)[WIDTH] > 0


def test_sampled_tokens_penalties_and_biases(pair):
    """The draws, edits and log-probabilities of a row are those of plain decoding at its position."""
    drawn = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=5, logprobs=3)
    repeated = tuple((token, 6.0) for token in range(20, 28))
    scores = {}

    def scenario(session):
        seen = scores.setdefault(session.serving, {name: [] for name in range(3)})
        session.add(0, random_prompt(40, 30), drawn)
        edited = dataclasses.replace(drawn, presence_penalty=0.7, frequency_penalty=0.4, logit_bias=repeated, seed=6)
        session.add(1, random_prompt(33, 31), edited)
        session.add(2, random_prompt(20, 32), dataclasses.replace(edited, temperature=0.0, top_k=4))
        while session.core.has_work:
            session.step()
            for name, found in session.core.scores.items():
                seen[name] += found
        session.run()

    session = pair.play(scenario, proposals=mixed, **OFF)
    assert sum(accepted(session)[2:]) > 3
    plain, drafting = scores[pair.plain], scores[pair.drafting]
    for name in range(3):
        assert len(drafting[name]) == 24
        for ours, expected in zip(drafting[name], plain[name], strict=True):
            assert ours.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [token for token, _ in ours.alternatives] == [token for token, _ in expected.alternatives]


class Alternating:
    """A constraint: after an even id an odd one, and the other way round."""

    def write_mask(self, generated, words):
        words[:] = 0xAAAAAAAA if generated.newest is not None and generated.newest % 2 == 0 else 0x55555555
        return True


def test_constraints_hold_along_the_proposals(pair):
    def scenario(session):
        for name in range(2):
            session.core.edits.constraints[name] = Alternating()
            session.add(name, random_prompt(20 + name, 60 + name), 20)
        session.run()

    session = pair.play(scenario, proposals=mixed, **OFF)
    for result in session.finished.values():
        assert [token % 2 for token in result.tokens] == [0, 1] * 10
    assert sum(accepted(session)[1:]) > 3


def test_one_verify_call_and_one_draft_call_a_step(pair):
    """A decode step is two calls, of programs that exist. A prefill drafts only when it gave some request a token."""
    options = {**OFF, "long_prefill_token_threshold": PAGE}
    pair.play(batched, **options)  # compiles
    session = pair.drafting.session(**options)
    runner = pair.drafting.runner
    calls = []
    programs = dict(runner._compiled)
    steps = collections.Counter()
    try:
        for key, program in programs.items():

            def counted(*arguments, key=key, call=program.call):
                calls.append("draft" if isinstance(key, int) else "verify" if key[0].verifies else "prefill")
                return call(*arguments)

            runner._compiled[key] = dataclasses.replace(program, call=counted)
        session.add(0, random_prompt(40, 70), 12)
        session.step()
        session.add(1, random_prompt(20, 71), 12)
        while session.core.has_work:
            called, logged = len(calls), len(session.log)
            session.step()
            for batch in session.log[logged:]:
                steps[batch.phase, bool(batch.output_requests.size)] += 1
                made = ["verify" if batch.phase is Phase.DECODE else "prefill"]
                assert calls[called:] == made + ["draft"] * bool(batch.output_requests.size)
            assert len(session.log) - logged == bool(calls[called:])
        assert runner._compiled.keys() == programs.keys()
    finally:
        runner._compiled.update(programs)
    assert calls[0] == "prefill" and calls[1] != "draft"
    assert steps[Phase.PREFILL, True] >= 1 and steps[Phase.DECODE, True] > 8 and not steps[Phase.DECODE, False]


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """`SHALLOW` and its draft."""
    path = tmp_path_factory.mktemp("shallow") / "model"
    write_checkpoint(path, **SHALLOW)
    return path


@pytest.mark.parametrize("main", ["fp4", "bf16"])
def test_quantized_caches(shallow, main):
    """Packed pools and the released precision: what is stored comes back, so the tokens are the same here too."""
    with Pair(shallow, kv_cache_dtype=main) as pair:

        def scenario(session):
            prompt = random_prompt(70, 80)
            session.add("first", prompt, 14)
            session.run()
            session.add("hit", prompt, 14)
            session.add("other", random_prompt(37, 81), 20)
            session.until(lambda: len(session.tokens("other")) >= 4)
            session.scheduler.preempt("other")
            session.run()

        session = pair.play(scenario, proposals=mixed, **OFF)
        assert sum(accepted(session)[1:]) > 3
        assert np.sum(accepted(session)) > 8


def test_log_probabilities_of_prompts(shallow):
    """Of prompts in one and in several chunks, beside a request that decodes: those of the forward over the prompt."""
    options = {"prompt_logprobs": True, **OFF}
    prompts = {"whole": random_prompt(29, 90), "chunked": random_prompt(3 * PAGE + 9, 91)}
    scores = {}

    def scenario(session):
        seen = scores.setdefault(session.serving, {name: {} for name in prompts})

        session.add("decoding", random_prompt(20, 92), 24)
        session.until(lambda: len(session.tokens("decoding")) >= 2)
        for name, prompt in prompts.items():
            session.add(name, prompt, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=True))
        while session.core.has_work:
            session.step()
            for scored in session.core.prompt_scores:
                seen[scored.request_id] |= dict(enumerate(scored.scores, scored.start))
        session.run()

    with Pair(shallow, **EXACT) as pair:
        for serving in (pair.plain, pair.drafting):
            serving.runner.scores_prompts = True
        session = pair.play(scenario, proposals=mixed, **options, long_prefill_token_threshold=PAGE)
        assert len(session.forwards("chunked")) >= 4 and sum(accepted(session)[1:]) > 3
        model = pair.plain.model
        for name, prompt in prompts.items():
            logits = full_forward(model.params, prompt, model.setup, model.lookup)
            expected = np.asarray(jax.nn.log_softmax(logits.astype(np.float64), axis=-1))
            for found in scores.values():
                # The row after the last token of the prompt scores no prompt token.
                wanted = {place: found[name][place] for place in range(1, len(prompt))}
                for place, score in wanted.items():
                    row = expected[place - 1]
                    assert score.logprob == pytest.approx(row[prompt[place]], abs=1e-4), (name, place)
                    assert [token for token, _ in score.alternatives] == np.argsort(-row)[:2].tolist(), (name, place)
