"""Stop rules inside an accepted block, and how many proposals a request may verify."""

import pytest

from scheduler.sequence import SamplingParams, Sequence
from scheduler.speculation import finalize_block, proposal_limit

EOS = (1,)
MAX_LEN = 100


def sequence(prompt=3, output=(), **sampling):
    made = Sequence("r", list(range(10, 10 + prompt)), SamplingParams(**{"max_tokens": 50} | sampling))
    if output:
        assert finalize_block(made, output, (), MAX_LEN) == (tuple(output), None)
    return made


def finalized(made, tokens):
    kept, reason = finalize_block(made, tokens, EOS, MAX_LEN)
    assert made.output_tokens[len(made.output_tokens) - len(kept) :] == kept
    assert made.num_tokens == made.num_finalized_tokens
    return kept, reason


def test_a_block_without_a_stop_is_kept_whole():
    assert finalized(sequence(output=[7]), [20, 21, 22, 23, 24, 25]) == ((20, 21, 22, 23, 24, 25), None)


@pytest.mark.parametrize("place", range(6))
def test_the_first_end_of_sequence_ends_the_block(place):
    tokens = [20, 21, 22, 23, 24, 25]
    tokens[place] = 1
    made = sequence(output=[7])
    assert finalized(made, tokens) == (tuple(tokens[: place + 1]), "eos")
    assert made.output_tokens == (7, *tokens[: place + 1])
    assert finalized(sequence(output=[7], ignore_eos=True), tokens) == (tuple(tokens), None)


def test_stop_ids_and_sequences_hold_inside_and_across_blocks():
    assert finalized(sequence(stop_token_ids=(22,)), [20, 22, 1]) == ((20, 22), "stop_22")
    assert finalized(sequence(stop_sequences=((21, 22),)), [20, 21, 22, 23]) == ((20, 21, 22), "stop_sequence")
    # The first half came with the block before; the prompt never counts.
    assert finalized(sequence(output=[5, 21], stop_sequences=((21, 22),)), [22, 23]) == ((22,), "stop_sequence")
    assert finalized(sequence(prompt=3, stop_sequences=((12, 22),)), [22, 23]) == ((22, 23), None)


@pytest.mark.parametrize("room", range(1, 8))
def test_the_output_cap_holds_inside_a_block(room):
    made = sequence(output=[7, 8], max_tokens=2 + room)
    kept, reason = finalized(made, [20, 21, 22, 23, 24, 25])
    assert len(kept) == min(room, 6) and reason == ("max_tokens" if room <= 6 else None)


@pytest.mark.parametrize("room", range(1, 8))
def test_no_more_proposals_are_verified_than_can_be_emitted(room):
    assert proposal_limit(sequence(output=[7, 8], max_tokens=2 + room), 5, MAX_LEN) == min(5, room - 1)
    assert proposal_limit(sequence(prompt=97 - room, output=[7, 8, 9]), 5, MAX_LEN) == min(5, room - 1)
    assert proposal_limit(sequence(output=[7]), 2, MAX_LEN) == 2


def test_tokens_in_flight_are_refused():
    made = sequence(output=[7])
    made.append_placeholder()
    with pytest.raises(RuntimeError, match="token for position 5 arrived, but 4 of 6 tokens are finalized"):
        finalize_block(made, [20], EOS, MAX_LEN)
