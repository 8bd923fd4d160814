import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vision.builders import TINY, encoded, golden_config, golden_image, random_image, random_picture
from v41jax.image_planning import ImageError, ImageGrid
from v41jax.image_processing import ProcessedImage, process_image
from v41jax.image_spans import (
    ImageSpan,
    TokenType,
    block_content,
    chunk_rows,
    content_digest,
    expand_placeholders,
    image_mask,
    locate_spans,
    span_embeddings,
    span_token_types,
)

IMAGE = 500
GRID = ImageGrid.of_patches(5, 7, 3)


def spans_at(*places):
    """Spans of (start, length), each with its own digest."""
    return [ImageSpan(start, length, bytes([start]) * 32, GRID) for start, length in places]


def test_the_type_layout_of_the_specification():
    assert span_token_types(GRID).tolist() == [0, 1, 1, 1, 2, 1, 1, 1, 2, 3]
    assert span_token_types(GRID).dtype == np.int8


@given(st.integers(1, 40), st.integers(1, 40))
def test_type_counts_follow_the_grid(patch_rows, patch_columns):
    grid = ImageGrid.of_patches(patch_rows, patch_columns, 3)
    types = span_token_types(grid).tolist()
    assert len(types) == grid.tokens == grid.rows * (grid.columns + 1) + 2
    assert (types.count(TokenType.PATCH), types.count(TokenType.NEWLINE)) == (grid.cells, grid.rows)
    assert types[0] == TokenType.START and types[-1] == TokenType.END and types[-2] == TokenType.NEWLINE


def test_placeholders_become_spans_and_text_keeps_its_type():
    images = [random_image(TINY, 5, 7), random_image(TINY, 2, 3, seed=1)]
    prompt = expand_placeholders([1, IMAGE, 2, 3, IMAGE, 4], images, IMAGE)
    assert prompt.token_ids.tolist() == [1] + [IMAGE] * 10 + [2, 3] + [IMAGE] * 4 + [4]
    assert prompt.token_types.tolist() == [-1, 0, 1, 1, 1, 2, 1, 1, 1, 2, 3, -1, -1, 0, 1, 2, 3, -1]
    assert [(span.start, span.length, span.end) for span in prompt.spans] == [(1, 10, 11), (13, 4, 17)]
    assert prompt.image_mask.tolist() == (prompt.token_ids == IMAGE).tolist()


def test_a_prompt_of_text_stays_as_it_is():
    prompt = expand_placeholders([3, 1, 2], [], IMAGE)
    assert prompt.token_ids.tolist() == [3, 1, 2] and prompt.spans == () and not prompt.image_mask.any()


@pytest.mark.parametrize("count", [0, 1, 3])
def test_placeholders_and_images_must_match(count):
    with pytest.raises(ImageError, match=f"2 image placeholders and {count} images"):
        expand_placeholders([IMAGE, 1, IMAGE], [random_image(TINY, 2, 3)] * count, IMAGE)


@given(st.lists(st.sampled_from([1, 2, IMAGE]), max_size=12), st.data())
def test_expanded_prompts_are_located_again(ids, data):
    sides = st.integers(1, 7)
    images = [random_image(TINY, data.draw(sides), data.draw(sides)) for _ in range(ids.count(IMAGE))]
    prompt = expand_placeholders(ids, images, IMAGE)
    located = locate_spans(prompt.token_ids, images, IMAGE)
    assert located.spans == prompt.spans
    assert located.token_types.tolist() == prompt.token_types.tolist()


@pytest.mark.parametrize(
    "ids",
    [[1, 2], [1] + [IMAGE] * 9, [IMAGE] * 5 + [1] + [IMAGE] * 5, [IMAGE] * 11, [IMAGE] * 10 + [1, IMAGE]],
)
def test_ids_that_are_not_exactly_the_spans_are_refused(ids):
    with pytest.raises(ImageError, match="image positions"):
        locate_spans(ids, [random_image(TINY, 5, 7)], IMAGE)


@pytest.mark.parametrize("name", ["pico", "five-layer"])
def test_the_golden_prompt_is_located(name):
    image, recorded = golden_image(name)
    prompt = locate_spans(recorded["image.ids"], [image], golden_config(name).image_token_id)
    (span,) = prompt.spans
    assert prompt.token_types[span.start : span.end].tolist() == recorded["image.types"].tolist()
    assert (span.start, span.end) == (7, 17)


def test_digests_agree_for_equal_pixels_whatever_the_container():
    picture = random_picture(33, 20)
    files = [encoded(picture), encoded(picture, "BMP"), encoded(picture, "WEBP", lossless=True)]
    assert len({content_digest(process_image(file, TINY)) for file in [*files, files[0]]}) == 1


def test_digests_differ_for_pixels_layout_and_dtype():
    image = random_image(TINY, 4, 6)
    changed = image.patches.copy()
    changed.view(np.uint16)[-1, -1] ^= 1
    variants = [
        image,
        ProcessedImage(changed, image.grid),
        ProcessedImage(image.patches, ImageGrid.of_patches(6, 4, 3)),
        ProcessedImage(image.patches, ImageGrid.of_patches(4, 6, 2)),
        ProcessedImage(image.patches.astype(np.float32), image.grid),
        ProcessedImage(image.patches.view(np.float16), image.grid),
    ]
    assert len({content_digest(variant) for variant in variants}) == len(variants)


def test_the_intersection_of_the_specification():
    rows = chunk_rows(spans_at((2, 4), (9, 3)), 4, 11)
    assert rows.destinations.tolist() == [0, 1, 5, 6]
    assert rows.sources.tolist() == [2, 3, 4, 5]
    empty = chunk_rows(spans_at((2, 4), (9, 3)), 6, 9)
    assert len(empty.destinations) == len(empty.sources) == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=4), st.integers(1, 9))
def test_chunks_of_any_size_visit_every_image_row_once_in_order(gaps, size):
    spans, position = [], 0
    for number, (gap, length) in enumerate(gaps):
        spans.append(ImageSpan(position + gap, length, bytes([number]) * 32, GRID))
        position += gap + length
    end = position + 3
    sources, positions = [], []
    for start in range(0, end, size):
        stop = min(start + size, end)
        rows = chunk_rows(spans, start, stop)
        mask = image_mask(spans, start, stop)
        assert np.flatnonzero(mask).tolist() == rows.destinations.tolist()
        assert len(mask) == stop - start
        sources += rows.sources.tolist()
        positions += (rows.destinations + start).tolist()
    assert sources == list(range(sum(length for _, length in gaps)))
    assert positions == [p for span in spans for p in range(span.start, span.end)]


def chain(prompt, page):
    """Prefix hashes as the runtime chains them, over all full pages."""
    hashes, parent = [], b""
    for start in range(0, len(prompt.token_ids) - page + 1, page):
        block = prompt.token_ids[start : start + page].tobytes()
        parent = hashlib.sha256(parent + block + block_content(prompt.spans, start, start + page)).digest()
        hashes.append(parent)
    return hashes


@pytest.mark.parametrize("page", [2, 4, 5, 32])
def test_equal_ids_share_pages_up_to_the_first_different_image(page):
    first, second, other = (random_image(TINY, 5, 7, seed=seed) for seed in range(3))
    ids = [*range(1, 14), IMAGE, *range(20, 30), IMAGE, *range(40, 60)]
    base = expand_placeholders(ids, [first, second], IMAGE)
    again = expand_placeholders(ids, [random_image(TINY, 5, 7), second], IMAGE)
    changed = expand_placeholders(ids, [first, other], IMAGE)
    swapped = expand_placeholders(ids, [second, first], IMAGE)
    assert base.token_ids.tolist() == changed.token_ids.tolist() == swapped.token_ids.tolist()
    assert chain(base, page) == chain(again, page)
    for variant, image in ((changed, 1), (swapped, 0)):
        shared = base.spans[image].start // page
        assert chain(base, page)[:shared] == chain(variant, page)[:shared]
        assert not set(chain(base, page)[shared:]) & set(chain(variant, page)[shared:])


def test_one_image_at_another_offset_does_not_match():
    # Two pages that lie wholly inside a span hold equal ids and one digest, but other rows of the image.
    spans = spans_at((3, 40))
    contents = [block_content(spans, start, start + 8) for start in range(0, 48, 8)]
    assert len(set(contents)) == 6 and len(contents[1]) == 40
    assert block_content(spans_at((2, 40)), 0, 8) != block_content(
        [dataclasses.replace(spans[0], digest=bytes([2]) * 32)], 0, 8
    )


def test_text_pages_hash_as_without_images():
    assert block_content(spans_at((8, 4)), 0, 8) == b"" == block_content(spans_at((8, 4)), 12, 20)


def test_touching_spans_both_enter_the_page():
    assert len(block_content(spans_at((0, 4), (4, 4)), 0, 8)) == 80


def test_a_span_is_assembled_from_aligner_rows_and_delimiters():
    aligner = np.arange(12, dtype=np.float32).reshape(6, 2)
    delimiters = np.array([[100, 100], [200, 200], [300, 300]], np.float32)
    rows = span_embeddings(aligner, delimiters, GRID)
    assert rows[:, 0].tolist() == [100, 0, 2, 4, 200, 6, 8, 10, 200, 300]
    assert rows.dtype == np.float32
    with pytest.raises(ImageError, match="gave 5 rows; a grid of 2 x 3 needs 6"):
        span_embeddings(aligner[:5], delimiters, GRID)
