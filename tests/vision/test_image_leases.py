import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vision.builders import TINY, random_image
from v41jax.image_leases import ImageCapacityError, ImageChunk, ImageLeases, row_bucket
from v41jax.image_planning import ImageError
from v41jax.image_spans import chunk_rows, content_digest, expand_placeholders

IMAGE = 500
WIDTH = 4
IMAGES = [random_image(TINY, 5, 7, seed=0), random_image(TINY, 2, 3, seed=1), random_image(TINY, 4, 4, seed=2)]
COSTS = [max(image.patches.nbytes, image.grid.tokens * 4 * WIDTH) for image in IMAGES]


class Encoder:
    """Rows that name their image and place; remembers what it was asked for."""

    def __init__(self):
        self.calls = []

    def __call__(self, images):
        self.calls.append([content_digest(image) for image in images])
        return [self.rows(image) for image in images]

    @staticmethod
    def rows(image):
        base = float(np.asarray(image.patches[0, 0], np.float32))
        return np.arange(image.grid.tokens * WIDTH, dtype=np.float32).reshape(-1, WIDTH) + base

    @property
    def encoded(self):
        return [digest for call in self.calls for digest in call]


def make(capacity=10_000, idle=0):
    encoder = Encoder()
    return ImageLeases(encoder, row_bytes=4 * WIDTH, capacity_bytes=capacity, idle_bytes=idle), encoder


def prompt_of(*numbers, gap=3):
    ids = [part for _ in numbers for part in [*range(1, gap + 1), IMAGE]] + [9] * gap
    images = [IMAGES[number] for number in numbers]
    return expand_placeholders(ids, images, IMAGE), images


def whole(prompt, images):
    """Destination and row of every image position of the prompt."""
    rows = np.concatenate([Encoder.rows(image) for image in images])
    return chunk_rows(prompt.spans, 0, len(prompt.token_ids)).destinations, rows


@pytest.mark.parametrize("size", [1, 2, 7, 63])
def test_chunks_of_any_size_read_the_same_rows_and_encode_once(size):
    leases, encoder = make()
    prompt, images = prompt_of(0, 1, 0)
    leases.acquire("a", prompt, images)
    positions, rows = [], []
    for start in range(0, len(prompt.token_ids), size):
        places, part = leases.rows("a", start, min(start + size, len(prompt.token_ids)))
        positions += (places + start).tolist()
        rows += part.tolist()
    expected_positions, expected_rows = whole(prompt, images)
    assert positions == expected_positions.tolist() and rows == expected_rows.tolist()
    assert sorted(encoder.encoded) == sorted({span.digest for span in prompt.spans})


def test_nothing_is_encoded_for_text_or_for_a_cached_image():
    leases, encoder = make()
    prompt, images = prompt_of(0, 1)
    leases.acquire("a", prompt, images)
    first, second = prompt.spans
    assert len(leases.rows("a", 0, first.start)[0]) == 0
    # A prefix hit covers the first image; the second is read by the rest.
    leases.rows("a", first.end, second.end)
    assert encoder.encoded == [second.digest]
    assert leases.rows("text", 0, 50)[0].tolist() == []


def test_requests_with_equal_images_share_one_encoding():
    leases, encoder = make()
    prompt, images = prompt_of(0)
    leases.acquire("a", prompt, images)
    leases.acquire("b", *prompt_of(0, gap=5))
    held = leases.held_bytes
    assert held == COSTS[0]
    leases.rows("a", 0, 20)
    leases.release("a")
    assert leases.held_bytes == held
    places, rows = leases.rows("b", 0, 30)
    assert len(encoder.calls) == 1
    np.testing.assert_array_equal(rows, Encoder.rows(IMAGES[0]))
    assert places.tolist() == list(range(5, 15))
    leases.release("b")
    assert leases.held_bytes == 0 and not leases.requests


def test_preemption_keeps_the_lease_and_encodes_nothing_again():
    leases, encoder = make()
    prompt, images = prompt_of(0)
    leases.acquire("a", prompt, images)
    before = leases.rows("a", 0, 20)
    leases.acquire("a", prompt, images)  # the request comes back with the same prompt
    after = leases.rows("a", 0, 20)
    np.testing.assert_array_equal(before[1], after[1])
    assert len(encoder.calls) == 1
    leases.release("a")
    assert not leases.requests


def test_other_images_under_a_live_request_are_an_error():
    leases, _ = make()
    leases.acquire("a", *prompt_of(0))
    for changed in (prompt_of(1), prompt_of(0, 1), prompt_of(0, gap=4)):
        with pytest.raises(ImageError, match="'a' is live with other images"):
            leases.acquire("a", *changed)
    assert leases.held_bytes == COSTS[0]


def test_a_fork_outlives_its_parent():
    leases, encoder = make()
    leases.acquire("a", *prompt_of(0))
    leases.fork("a", "b")
    leases.fork("text", "c")
    leases.release("a")
    assert leases.requests == {"b"}
    leases.rows("b", 0, 20)
    with pytest.raises(ImageError, match="'b' already holds a lease"):
        leases.fork("b", "b")
    leases.release("b")
    assert leases.held_bytes == 0 and len(encoder.calls) == 1


def test_cancelling_twice_or_without_images_changes_nothing():
    leases, _ = make()
    leases.acquire("a", *prompt_of(0))
    leases.acquire("text", expand_placeholders([1, 2], [], IMAGE), [])
    leases.acquire("b", *prompt_of(0))
    for request in ("a", "a", "text", "unknown"):
        leases.release(request)
    assert leases.requests == {"b"} and leases.held_bytes == COSTS[0]


def test_rows_read_before_a_cancellation_stay_valid():
    leases, _ = make()
    leases.acquire("a", *prompt_of(0))
    _, rows = leases.rows("a", 0, 20)
    rows[:] = -1  # the reader owns its copy
    np.testing.assert_array_equal(leases.rows("a", 0, 20)[1], Encoder.rows(IMAGES[0]))
    leases.release("a")


def test_the_capacity_is_refused_for_ever_or_for_now():
    leases, _ = make(capacity=COSTS[0] + COSTS[2])
    with pytest.raises(ImageCapacityError, match=f"take {sum(COSTS)} bytes; at most") as never:
        leases.acquire("a", *prompt_of(0, 1, 2))
    assert never.value.permanent and not leases.requests
    leases.acquire("a", *prompt_of(0, 0))
    leases.acquire("c", *prompt_of(0, 1))  # the shared image costs nothing again
    assert leases.held_bytes == COSTS[0] + COSTS[1]
    with pytest.raises(ImageCapacityError, match=f"{COSTS[0] + COSTS[1]} of .* needs {COSTS[2]} more") as later:
        leases.acquire("b", *prompt_of(0, 2))
    assert not later.value.permanent and leases.requests == {"a", "c"}
    assert leases.held_bytes == COSTS[0] + COSTS[1]
    leases.release("a")
    leases.release("c")
    leases.acquire("b", *prompt_of(0, 2))


def test_idle_images_are_kept_within_their_budget_oldest_dropped_first():
    leases, encoder = make(capacity=10_000, idle=COSTS[0] + COSTS[2])
    for number in (0, 1):
        leases.acquire(number, *prompt_of(number))
        leases.rows(number, 0, 20)
        leases.release(number)
    assert leases.idle_bytes == COSTS[0] + COSTS[1] and leases.held_bytes == 0
    leases.acquire("again", *prompt_of(0))  # now in use: image 1 is the oldest idle one
    leases.rows("again", 0, 20)
    assert len(encoder.calls) == 2
    leases.release("again")
    leases.acquire("third", *prompt_of(2))
    leases.release("third")
    leases.acquire("first", *prompt_of(0, 1))
    leases.rows("first", 0, 40)
    assert encoder.calls[2:] == [[content_digest(IMAGES[1])]], "only image 1 was dropped"


def test_an_idle_image_in_use_again_is_not_dropped():
    leases, encoder = make(capacity=COSTS[0], idle=COSTS[0])
    for _ in range(3):
        leases.acquire("a", *prompt_of(0))
        assert (leases.held_bytes, leases.idle_bytes) == (COSTS[0], 0)
        np.testing.assert_array_equal(leases.rows("a", 0, 20)[1], Encoder.rows(IMAGES[0]))
        leases.release("a")
    assert len(encoder.calls) == 1


def test_idle_images_give_way_to_a_request():
    leases, _ = make(capacity=COSTS[0], idle=COSTS[0])
    leases.acquire("a", *prompt_of(0))
    leases.release("a")
    assert leases.idle_bytes == COSTS[0]
    leases.acquire("b", *prompt_of(1))
    assert leases.idle_bytes == 0


def test_a_failed_encoding_leaves_the_lease_usable():
    leases, _ = make()
    prompt, images = prompt_of(0)
    leases.acquire("a", prompt, images)
    good, leases._encode = leases._encode, lambda images: [np.zeros((3, WIDTH), np.float32)]
    with pytest.raises(ImageError, match=r"gave \[3\] rows for spans of \[10\]"):
        leases.rows("a", 0, 20)
    leases._encode = good
    np.testing.assert_array_equal(leases.rows("a", 0, 20)[1], Encoder.rows(IMAGES[0]))


def test_batch_rows_place_every_request_and_pad_out_of_range():
    leases, _ = make()
    leases.acquire("a", *prompt_of(0))
    leases.acquire("b", *prompt_of(1, 0))
    chunks = [ImageChunk("a", 5, 9, 0), ImageChunk("text", 0, 6, 4), ImageChunk("b", 0, 8, 10)]
    rows, places = leases.batch_rows(chunks, 32)
    assert places[:8].tolist() == [0, 1, 2, 3, 13, 14, 15, 16]
    np.testing.assert_array_equal(rows[:4], Encoder.rows(IMAGES[0])[2:6])
    np.testing.assert_array_equal(rows[4:8], Encoder.rows(IMAGES[1]))
    assert (places[8:] == 32).all() and len(places) == len(rows) == 64
    assert leases.batch_rows([ImageChunk("a", 0, 3, 0), ImageChunk("text", 0, 6, 3)], 32) is None


def test_row_buckets_are_few():
    assert {row_bucket(count) for count in range(1, 4097)} == {64, 128, 256, 512, 1024, 2048, 4096}
    assert all(row_bucket(count) >= count for count in range(1, 4097))


@given(
    st.lists(
        st.tuples(st.sampled_from(["acquire", "release", "rows", "fork"]), st.integers(0, 3), st.integers(0, 5)),
        max_size=40,
    ),
    st.sampled_from([0, COSTS[0], 10_000]),
)
@settings(max_examples=100, deadline=None)
def test_accounting_under_any_order_of_events(events, idle):
    choices = [prompt_of(0), prompt_of(1), prompt_of(0, 1), prompt_of(2, 2), prompt_of(1, 0, 2), prompt_of()]
    leases, _ = make(capacity=sum(COSTS), idle=idle)
    live = {}
    for action, request, choice in events:
        prompt, images = choices[choice]
        if action == "acquire" and request not in live:
            leases.acquire(request, prompt, images)
            if images:
                live[request] = (prompt, images)
        elif action == "release":
            leases.release(request)
            live.pop(request, None)
        elif action == "fork" and request in live and 3 - request not in live:
            leases.fork(request, 3 - request)
            live[3 - request] = live[request]
        elif action == "rows" and request in live:
            prompt, images = live[request]
            places, rows = leases.rows(request, 0, len(prompt.token_ids))
            expected_places, expected_rows = whole(prompt, images)
            np.testing.assert_array_equal(places, expected_places)
            np.testing.assert_array_equal(rows, expected_rows)
        used = {span.digest: span for prompt, _ in live.values() for span in prompt.spans}
        costs = dict(zip(map(content_digest, IMAGES), COSTS, strict=True))
        assert leases.requests == set(live)
        assert leases.held_bytes == sum(costs[digest] for digest in used)
        assert leases.idle_bytes <= min(idle, sum(COSTS) - leases.held_bytes)
    for request in list(live):
        leases.release(request)
    assert leases.held_bytes == 0 and not leases.requests
