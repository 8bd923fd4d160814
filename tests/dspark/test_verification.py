"""Acceptance, draws and commits of verify steps, apart from any model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler.batch import DEAD
from scheduler.pool_geometry import V41PoolGeometry
from scheduler.pools import allocate
from v41jax.sampling import SamplingInputs, sample
from v41jax.spans import Span, batch_of
from v41jax.verification import (
    AcceptanceError,
    Verified,
    accept,
    check_committed,
    commit,
    row_sampling,
    stage,
    verify,
)

WIDTH = 6
GEOMETRY = V41PoolGeometry(
    layers=2,
    owners=((0, 2), (1, 1)),
    block_size=32,
    window_size=8,
    head_dim=32,
    index_dim=32,
    speculative_tokens=WIDTH - 1,
    draft_layers=1,
)


def verify_batch(rows, starts, slots, requests=4, padded_rows=24):
    """A verify step of the given rows (anchor first) of each request; compressed ids are ids + 100."""
    spans = [
        Span(
            start=start,
            token_ids=np.array(ids),
            compressed_ids=np.array(ids) + 100,
            slot=slot,
            pages=range(2),
            history=np.full(GEOMETRY.history_size, DEAD),
        )
        for ids, start, slot in zip(rows, starts, slots)
    ]
    return batch_of(spans, GEOMETRY, rows=padded_rows, requests=requests)


def accepted(choices, drafts):
    batch = verify_batch([[50, *drafts]], [7], [1])
    padded = np.zeros(24, np.int32)
    padded[: len(choices)] = choices
    verified = accept(jnp.asarray(padded), batch, WIDTH)
    count = int(verified.committed[0])
    return count, verified.tokens[0].tolist(), verified.committed[1:].tolist()


def test_the_published_example():
    count, tokens, padding = accepted([0, 0, 1, 4, 4, 4], [0, 0, 3, 2, 1])
    assert (count, tokens[:count], padding) == (3, [0, 0, 1], [0, 0, 0])
    assert tokens[count:] == [-1, -1, -1]


@pytest.mark.parametrize("drafts", range(WIDTH))
def test_every_accepted_length_of_every_width(drafts):
    proposals = [11, 12, 13, 14, 15][:drafts]
    for agreeing in range(drafts + 1):
        # After a disagreement the rest agrees again: it must not be accepted.
        choices = [token + (index == agreeing) for index, token in enumerate(proposals)] + [77]
        count, tokens, _ = accepted(choices, proposals)
        assert count == agreeing + 1
        assert tokens[:count] == choices[:count]


def test_a_choice_is_never_compared_with_the_next_requests_anchor():
    # Request 0 verifies nothing; its choice equals the anchor of request 1.
    batch = verify_batch([[5], [9, 8], [7, 6, 5]], [3, 40, 20], [2, 0, 3])
    choices = np.zeros(24, np.int32)
    choices[:6] = [9, 8, 1, 6, 5, 4]
    verified = accept(jnp.asarray(choices), batch, WIDTH)
    assert verified.committed.tolist() == [1, 2, 3, 0]
    assert verified.tokens[:, :3].tolist() == [[9, -1, -1], [8, 1, -1], [6, 5, 4], [-1, -1, -1]]


def request_sampling(requests, **changes):
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "positions": 0} | changes
    dtypes = (np.float32, np.int32, np.float32, np.float32, np.uint32, np.int32)
    return SamplingInputs(*(np.broadcast_to(np.asarray(values[k], t), requests) for k, t in zip(values, dtypes)))


def test_a_row_draws_what_plain_decoding_draws_at_its_position():
    logits = np.random.default_rng(0).normal(size=(24, 40)).astype(np.float32)
    batch = verify_batch([[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]], [10, 20, 30], [1, 2, 3])
    parameters = request_sampling(
        4, seeds=[3, 4, 5, 0], positions=[11, 21, 31, 0], temperature=[0.8, 0.0, 1.3, 1.0], top_k=[0, 3, 7, 0]
    )
    together = np.asarray(sample(jnp.asarray(logits), row_sampling(parameters, batch)))
    row = 0
    for request, (start, length) in enumerate(((10, 3), (20, 1), (30, 6))):
        for offset in range(length):
            alone = jax.tree.map(lambda leaf, request=request: leaf[request : request + 1], parameters)
            alone = alone._replace(positions=np.array([start + 1 + offset], np.int32))
            assert int(sample(jnp.asarray(logits[row : row + 1]), alone)[0]) == together[row]
            row += 1


def test_emitted_tokens_are_those_of_plain_decoding_and_follow_the_targets_distribution():
    vocabulary, requests, length = 4, 400, 8
    rng = np.random.default_rng(1)
    table = rng.normal(size=(vocabulary, vocabulary)).astype(np.float32) * 1.5
    seeds = np.arange(requests)
    draw = jax.jit(sample)
    step = jax.jit(verify, static_argnames="width")

    plain = np.zeros((requests, length + WIDTH), np.int64)
    for position in range(length + WIDTH - 1):
        inputs = request_sampling(requests, seeds=seeds, positions=position + 1, temperature=0.9)
        plain[:, position + 1] = draw(jnp.asarray(table[plain[:, position]]), inputs)

    emitted = [[0] for _ in range(requests)]
    while min(map(len, emitted)) <= length:
        # A draft of any quality: half of the proposals are the target's favourite.
        rows = []
        for known in emitted:
            ids = [known[-1]]
            for _ in range(int(rng.integers(0, WIDTH))):
                favourite = int(table[ids[-1]].argmax())
                ids.append(favourite if rng.random() < 0.5 else int(rng.integers(vocabulary)))
            rows.append(ids)
        starts = [len(known) - 1 for known in emitted]
        batch = verify_batch(rows, starts, range(requests), requests, requests * WIDTH)
        inputs = request_sampling(requests, seeds=seeds, positions=np.array(starts) + 1, temperature=0.9)
        verified, _ = step(jnp.asarray(table[batch.token_ids]), batch, inputs, width=WIDTH)
        for known, tokens, count in zip(emitted, verified.tokens.tolist(), verified.committed.tolist()):
            known += tokens[:count]
    for known, expected in zip(emitted, plain.tolist()):
        assert known[: length + 1] == expected[: length + 1]

    def softmax(logits):
        return np.asarray(jax.nn.softmax(logits / 0.9, axis=-1), np.float64)

    expected = softmax(table[0])[:, None] * softmax(table)
    observed = np.zeros((vocabulary, vocabulary))
    for known in emitted:
        observed[known[1], known[2]] += 1 / requests
    # Five standard deviations of a binomial share.
    assert np.all(np.abs(observed - expected) <= 5 * np.sqrt(expected * (1 - expected) / requests))


def slots_with_histories():
    pools = allocate(GEOMETRY, 2, 4)
    cursor = np.array([[9, 1, 2, 3], [10, 21, 22, 23], [0, -1, -1, -1], [30, -1, 31, 32]], np.int32)
    return pools.replace(cursor=jnp.asarray(cursor), last_token=jnp.arange(4, dtype=jnp.int32) + 60)


def test_every_prefix_is_staged_and_only_the_accepted_one_is_committed():
    pools = slots_with_histories()
    batch = verify_batch([[40, 41, 42, 43, 44, 45], [50, 51]], [10, 30], [1, 3])
    staged = stage(pools, batch, WIDTH)
    for request, (slot, start, ids) in enumerate(((1, 10, range(40, 46)), (3, 30, range(50, 52)))):
        known = [*pools.cursor[slot, 1:].tolist(), *(token + 100 for token in ids)]
        for count in range(1, len(ids) + 1):
            assert staged.cursors[request, count - 1].tolist() == [start + count, *known[count : count + 3]]
            tokens = np.full((4, WIDTH), -1, np.int32)
            tokens[request, :count] = range(70, 70 + count)
            verified = Verified(jnp.asarray(tokens), jnp.zeros(4, jnp.int32).at[request].set(count))
            after = commit(pools, staged, verified)
            assert after.cursor[slot].tolist() == [start + count, *known[count : count + 3]]
            assert int(after.last_token[slot]) == 69 + count
            for other in {0, 1, 2, 3} - {slot}:
                # Slot 0 is what padding requests name.
                assert np.array_equal(after.cursor[other], pools.cursor[other])
                assert int(after.last_token[other]) == 60 + other
            assert np.array_equal(after.window, pools.window) and np.array_equal(after.tail_kv, pools.tail_kv)


@pytest.mark.parametrize("count", [0, 3, 7, -1])
def test_a_count_outside_the_staged_rows_commits_nothing_and_is_an_error_on_the_host(count):
    pools = slots_with_histories()
    batch = verify_batch([[40, 41]], [10], [1])
    staged = stage(pools, batch, WIDTH)
    verified = Verified(jnp.full((4, WIDTH), 5, jnp.int32), jnp.array([count, 0, 0, 0], jnp.int32))
    after = commit(pools, staged, verified)
    assert np.array_equal(after.cursor, pools.cursor) and np.array_equal(after.last_token, pools.last_token)
    with pytest.raises(AcceptanceError, match=f"batch position 0 committed {count} of 2 rows"):
        check_committed(verified.committed, [2])


def test_a_result_must_commit_within_the_scheduled_rows_of_every_request():
    check_committed([1, 6, 2, 0], [1, 6, 5])
    with pytest.raises(AcceptanceError, match=r"position 1 committed 0 of 3 rows; batch position 3 committed 1 of 0"):
        check_committed([1, 0, 2, 1], [1, 3, 5])
