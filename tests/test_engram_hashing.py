"""Engram hashing against the published figures, big integers, and the rules of chunks and DEAD tokens."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.batch import DEAD
from tests.helpers.engram import identity_map, released_engram_config, with_text, worked_example_config
from v41jax.engram_hashing import EngramHasher, EngramIdError, history_before

RELEASED = EngramHasher(released_engram_config(), identity_map(129280))
SMALL = EngramHasher(worked_example_config(), identity_map(32))
FRESH = [DEAD, DEAD, DEAD]

RELEASED_PRIMES_1 = [
    *(57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321),
    *(339, 381, 393, 399, 403, 409, 447, 463),
]
RELEASED_PRIMES_14 = [
    *(477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769),
    *(781, 799, 813, 819, 841, 877, 879, 889),
]

WORKED_SEQUENCE = [5, 9, 9, DEAD, 7, 3, 11, 5]
WORKED_ROWS = [
    ([2, 86, 141, 183, 301, 372], [4, 99, 204, 299, 416, 522]),
    ([28, 89, 162, 229, 244, 342], [49, 102, 189, 345, 371, 548]),
    ([10, 110, 137, 207, 282, 374], [69, 113, 228, 297, 383, 484]),
    ([2, 85, 157, 235, 289, 334], [12, 93, 250, 304, 405, 456]),
    ([43, 93, 115, 183, 303, 351], [77, 158, 237, 279, 373, 482]),
    ([45, 75, 135, 198, 243, 380], [55, 82, 191, 306, 380, 537]),
    ([36, 53, 132, 184, 302, 371], [77, 110, 176, 311, 356, 462]),
    ([22, 107, 132, 230, 249, 327], [73, 153, 172, 284, 396, 471]),
]

sequences = st.lists(st.one_of(st.just(DEAD), st.integers(0, 31)), min_size=1, max_size=24)


def rows_of(hasher: EngramHasher, compressed: list[int]) -> np.ndarray:
    return hasher.row_ids([*FRESH, *compressed])


def test_primes_offsets_and_multipliers_of_the_released_configuration():
    assert (RELEASED.primes - 16_000_000).tolist() == [RELEASED_PRIMES_1, RELEASED_PRIMES_14]
    assert RELEASED.primes.sum(axis=1).tolist() == [384_006_168, 384_016_682]
    assert np.unique(RELEASED.primes).size == 48
    assert RELEASED.offsets[0, :4].tolist() == [0, 16000057, 32000136, 48000217]
    assert RELEASED.offsets[1, :4].tolist() == [0, 16000477, 32000964, 48001463]
    assert RELEASED.offsets[:, -1].tolist() == [368005705, 368015793]
    assert RELEASED.multipliers.tolist() == [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ]


def test_no_product_of_a_compressed_id_and_a_multiplier_can_wrap():
    assert (99_092 - 1) * int(RELEASED.multipliers.max()) < 2**63


def test_worked_example():
    assert SMALL.primes.tolist() == [[53, 59, 61, 67, 71, 73], [79, 83, 89, 97, 101, 103]]
    assert SMALL.offsets.tolist() == [[0, 53, 112, 173, 240, 311], [0, 79, 162, 251, 348, 449]]
    assert SMALL.multipliers.tolist() == [
        [237300864419207287, 14987281307456977, 111353620295905115, 229111038857094539],
        [85240722207167499, 252868047889091175, 33684873675973757, 217683273637190441],
    ]
    assert rows_of(SMALL, WORKED_SEQUENCE).tolist() == [[list(a), list(b)] for a, b in WORKED_ROWS]


def test_rows_of_the_sequence_10_20_30_40():
    rows = rows_of(RELEASED, [10, 20, 30, 40])
    assert rows[3, 0].tolist() == [
        *(1326936, 22120929, 40011923, 55142539, 77849479, 85421395, 105208034, 120570043),
        *(142088989, 151706440, 164511320, 186980067, 199834903, 222266846, 231919637, 244765195),
        *(270969918, 287524568, 292261800, 310632033, 322879311, 341250912, 361620893, 378628807),
    ]
    assert rows[3, 1].tolist() == [
        *(5403109, 26519290, 42262171, 52759697, 74009651, 83431750, 98759453, 114437397),
        *(136663117, 159466275, 161102974, 190712189, 206344738, 219595678, 225703309, 243746465),
        *(258079010, 283475728, 290789713, 309926711, 321434350, 340293184, 357342800, 378588994),
    ]
    ends = [0, 7, 8, 15, 16, 23]
    assert rows[0, :, ends].T.tolist() == [
        [9400104, 114349277, 128026094, 254838319, 261350200, 382122658],
        [11315085, 116830007, 135395884, 241909330, 269973942, 379075217],
    ]


def test_a_token_after_an_image_sees_only_itself():
    rows = rows_of(RELEASED, [0, 309, 9, 76, DEAD, DEAD, DEAD, 20])
    assert rows[7, 0, :4].tolist() == [14126503, 23861730, 39292567, 50740440]
    assert rows[7, 1, :4].tolist() == [6914856, 18643983, 45520669, 58105776]
    assert np.array_equal(rows[7], rows_of(RELEASED, [20])[0])


def test_golden_rows_at_real_size():
    rows = rows_of(RELEASED, [0, 17, 4242, DEAD, 99091, 50000])
    ends = [0, 7, 8, 15, 16, 23]
    assert rows[:, 0, ends].tolist() == [
        [5702652, 121476532, 131476717, 247482304, 257520185, 380066193],
        [15771438, 124804252, 134548059, 254532373, 267074741, 374715336],
        [9932941, 113768477, 140290216, 250889293, 258129657, 382012254],
        [4299726, 112312540, 129401291, 250883315, 264341430, 370096053],
        [2008568, 125647891, 134138602, 253556857, 264495124, 370110214],
        [3518010, 112703079, 132525071, 255875856, 262522063, 375890084],
    ]
    digests = [hashlib.sha256(rows[:, layer].astype("<i8").tobytes()).hexdigest() for layer in range(2)]
    assert digests == [
        "a2309a2cd3c482e1f04e57d2283ac95fc4ebd1a5aa7fb0c1ca9fc2acc7bb3b55",
        "a92dd3739b92613f1794912e356e09df9b0f6d9ec9474c54724e70ffda76f816",
    ]


def big_integer_rows(hasher: EngramHasher, window: list[int]) -> list[list[int]]:
    """The hash of one token in Python integers, straight from the definition; `window` has the token first."""
    heads = hasher.columns // hasher.history_size
    result = []
    for layer in range(len(hasher.primes)):
        blocked, mixed, rows = False, 0, []
        for shift, compressed in enumerate(window):
            blocked = blocked or compressed == DEAD
            mixed ^= (hasher.pad if blocked else compressed) * int(hasher.multipliers[layer, shift])
            if shift:
                columns = range((shift - 1) * heads, shift * heads)
                rows += [mixed % int(hasher.primes[layer, c]) + int(hasher.offsets[layer, c]) for c in columns]
        result.append(rows)
    return result


@given(st.lists(st.one_of(st.just(DEAD), st.integers(0, 99_091), st.just(99_091)), min_size=4, max_size=4))
def test_hash_equals_big_integer_arithmetic(window):
    assert RELEASED.row_ids(window[::-1]).tolist() == [big_integer_rows(RELEASED, window)]


@given(sequences, st.data())
def test_any_chunking_equals_hashing_at_once(sequence, data):
    whole = rows_of(SMALL, sequence)
    done, parts = 0, []
    while done < len(sequence):
        size = data.draw(st.integers(1, len(sequence) - done))
        chunk = sequence[done : done + size]
        parts.append(SMALL.row_ids([*history_before(sequence, done, 3), *chunk]))
        done += size
    assert np.array_equal(np.concatenate(parts), whole)


@settings(max_examples=50)
@given(st.lists(st.tuples(sequences, st.integers(0, 23)), min_size=1, max_size=5), st.integers(0, 3))
def test_a_flat_batch_equals_each_request_alone(requests, padding):
    chunks, histories, expected = [], [], []
    for sequence, cut in requests:
        start = min(cut, len(sequence))
        chunks.append(sequence[start:])
        histories.append(history_before(sequence, start, 3))
        expected.append(rows_of(SMALL, sequence)[start:])
    bounds = np.cumsum([0, *map(len, chunks)])
    flat = [token for chunk in chunks for token in chunk] + [DEAD] * padding
    assert np.array_equal(SMALL.batch_row_ids(flat, histories, bounds), np.concatenate(expected))


@given(sequences, st.data())
def test_a_changed_token_reaches_only_the_rows_that_look_back_to_it(sequence, data):
    place = data.draw(st.integers(0, len(sequence) - 1))
    changed = list(sequence)
    changed[place] = data.draw(st.integers(0, 31))
    moved = np.flatnonzero((rows_of(SMALL, sequence) != rows_of(SMALL, changed)).any(axis=(1, 2)))
    assert all(place <= row <= place + 3 for row in moved)


def test_history_of_every_accepted_count_of_a_speculative_block():
    sequence = [9, DEAD, 7, 3, 11, 5, 8, 8, 8]
    committed = [history_before(sequence, 3 + accepted, 3).tolist() for accepted in range(1, 7)]
    assert committed == [[DEAD, 7, 3], [7, 3, 11], [3, 11, 5], [11, 5, 8], [5, 8, 8], [8, 8, 8]]


@pytest.mark.parametrize("position", range(9))
def test_a_restored_history_gives_the_rows_of_the_uninterrupted_run(position):
    history = history_before(WORKED_SEQUENCE, position, 3)
    resumed = SMALL.row_ids([*history, *WORKED_SEQUENCE[position:]])
    assert np.array_equal(resumed, rows_of(SMALL, WORKED_SEQUENCE)[position:])


def test_history_before_the_start_is_dead():
    assert history_before([], 0, 3).tolist() == FRESH
    assert history_before([4, 6], 2, 3).tolist() == [DEAD, 4, 6]


def test_other_ngram_sizes_and_a_shifted_seed():
    config = with_text(
        worked_example_config(),
        engram_max_ngram_size=2,
        engram_layer_ids=(0,),
        engram_num_embeddings=(53 + 59,),
        engram_seed=5,
    )
    hasher = EngramHasher(config, identity_map(32))
    assert hasher.history_size == 1 and hasher.columns == 2
    bound = (2**63 - 1) // 32 // 2
    assert hasher.multipliers.tolist() == [(2 * np.random.default_rng(5).integers(0, bound, 2) + 1).tolist()]
    assert hasher.row_ids([DEAD, 4, 6]).tolist() == [big_integer_rows(hasher, w) for w in ([4, DEAD], [6, 4])]


def test_a_configuration_without_engram_layers_has_no_rows():
    config = with_text(worked_example_config(), engram_layer_ids=(), engram_num_embeddings=())
    assert EngramHasher(config, identity_map(32)).row_ids([*FRESH, 1, 2]).shape == (2, 0, 6)


def test_table_rows_that_do_not_fit_the_primes_are_refused_for_every_layer():
    config = with_text(worked_example_config(), engram_num_embeddings=(385, 553))
    with pytest.raises(ValueError, match=r"layer 1: .* 384 rows.* 385; layer 3: .* 552 rows.* 553"):
        EngramHasher(config, identity_map(32))


def test_compress_maps_ids_and_marks_masked_ones_dead():
    token_map = np.array([0, 1, 2, 1, 0, *range(3, 30)], np.int32)
    hasher = EngramHasher(worked_example_config(), token_map)
    compressed = hasher.compress([3, 4, -7, 5], [False, False, True, False])
    assert compressed.dtype == np.int32
    assert compressed.tolist() == [1, 0, DEAD, 3]


@pytest.mark.parametrize("token", [-1, 32])
def test_compress_refuses_ids_outside_the_map(token):
    with pytest.raises(EngramIdError, match=rf"token id {token} at offset 1 is outside 0\.\.31"):
        SMALL.compress([0, token])


@pytest.mark.parametrize("compressed", [-2, 32])
def test_hashing_refuses_ids_that_are_no_compressed_ids(compressed):
    with pytest.raises(EngramIdError, match=rf"compressed id {compressed} .* within 0\.\.31"):
        SMALL.row_ids([*FRESH, compressed])
