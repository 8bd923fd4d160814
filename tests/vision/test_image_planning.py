import dataclasses
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.vision.builders import RELEASED, TINY
from v41jax.image_planning import ImageError, ImageGrid, image_token_count, plan_image

# (width, height) -> (canvas width, height), ViT grid (height, width), patches, language grid, tokens
PLANNING_TABLE = [
    ((1, 1), (546, 546), (39, 39), 1521, (13, 13), 184),
    ((14, 14), (546, 546), (39, 39), 1521, (13, 13), 184),
    ((100, 100), (546, 546), (39, 39), 1521, (13, 13), 184),
    ((544, 544), (546, 546), (39, 39), 1521, (13, 13), 184),
    ((560, 560), (560, 560), (40, 40), 1600, (14, 14), 212),
    ((315, 224), (658, 462), (33, 47), 1551, (11, 16), 189),
    ((111, 333), (322, 952), (68, 23), 1564, (23, 8), 209),
    ((640, 480), (644, 490), (35, 46), 1610, (12, 16), 206),
    ((400, 900), (406, 910), (65, 29), 1885, (22, 10), 244),
    ((31, 517), (140, 2226), (159, 10), 1590, (53, 4), 267),
    ((4000, 40), (5446, 56), (4, 389), 1556, (2, 130), 264),
    ((999, 701), (1008, 714), (51, 72), 3672, (17, 24), 427),
    ((1024, 1024), (1036, 1036), (74, 74), 5476, (25, 25), 652),
    ((1280, 720), (1288, 728), (52, 92), 4784, (18, 31), 578),
    ((1920, 1080), (1708, 966), (69, 122), 8418, (23, 41), 968),
    ((2500, 2500), (1302, 1302), (93, 93), 8649, (31, 31), 994),
    ((4032, 3024), (1512, 1134), (81, 108), 8748, (27, 36), 1001),
    ((3024, 4032), (1134, 1512), (108, 81), 8748, (36, 27), 1010),
    ((4000, 3000), (1512, 1134), (81, 108), 8748, (27, 36), 1001),
    ((100000, 20), (42882, 42), (3, 3063), 9189, (1, 1021), 1024),
    ((20, 100000), (42, 21462), (1533, 3), 4599, (511, 1), 1024),
]

SIDES = st.integers(1, 200_000) | st.integers(1, 3000)
CONFIGS = st.sampled_from([RELEASED, TINY, dataclasses.replace(RELEASED, max_wh_ratio=3.0)])


@pytest.mark.parametrize(("size", "canvas", "patch_grid", "patches", "grid", "tokens"), PLANNING_TABLE)
def test_worked_values(size, canvas, patch_grid, patches, grid, tokens):
    plan = plan_image(*size, RELEASED)
    assert (plan.canvas_width, plan.canvas_height) == canvas
    assert (plan.grid.patch_rows, plan.grid.patch_columns) == patch_grid
    assert (plan.grid.patches, plan.grid.tokens) == (patches, tokens)
    assert (plan.grid.rows, plan.grid.columns) == grid
    assert image_token_count(*size, RELEASED) == tokens


@given(SIDES, SIDES, CONFIGS)
@example(1, 65536, TINY)
def test_no_size_exceeds_the_cap_or_leaves_the_canvas(width, height, config):
    try:
        plan = plan_image(width, height, config)
    except ImageError as error:
        assert f"{width} x {height}" in str(error)
        # Only where a side of at most half a pixel is left of the longest canvas.
        longest = (config.max_image_tokens - 2) // 2 * config.patch_size * config.downsample_ratio
        assert max(width, height) / min(width, height) >= 2 * longest
        return
    assert plan.grid.tokens <= config.max_image_tokens
    assert plan.grid.patches <= (config.max_image_tokens - 3) * config.downsample_ratio**2
    assert plan.canvas_width == plan.grid.patch_columns * config.patch_size
    assert plan.canvas_height == plan.grid.patch_rows * config.patch_size
    assert 0 <= plan.left <= plan.canvas_width - plan.resized_width
    assert 0 <= plan.top <= plan.canvas_height - plan.resized_height
    assert plan.resized_width == plan.canvas_width or plan.resized_height == plan.canvas_height


@given(st.integers(1, 90), st.integers(1, 90))
def test_token_count_equals_counting_the_cells_of_the_canvas(width, height):
    plan = plan_image(width, height, TINY)
    cells = {(y // 6, x // 6) for y in range(plan.canvas_height) for x in range(plan.canvas_width)}
    lines = {y for y, _ in cells}
    assert image_token_count(width, height, TINY) == 1 + len(cells) + len(lines) + 1
    assert plan.grid.cells == len(cells)


@given(st.integers(544, 900), st.integers(544, 900))
def test_a_size_within_both_limits_gets_the_smallest_canvas_that_covers_it(width, height):
    plan = plan_image(width, height, RELEASED)
    assert 0 <= plan.canvas_width - width < RELEASED.patch_size
    assert 0 <= plan.canvas_height - height < RELEASED.patch_size


def test_padding_is_centred_half_to_even():
    # 100 x 50 is planned as 770 x 392 with 14-pixel patches and contained as 770 x 385: offset round(3.5) = 4.
    plan = plan_image(100, 50, RELEASED)
    assert (plan.canvas_width, plan.canvas_height) == (770, 392)
    assert (plan.resized_width, plan.resized_height, plan.left, plan.top) == (770, 385, 0, 4)


def test_a_ratio_limit_narrows_the_plan_and_stretches():
    config = dataclasses.replace(RELEASED, max_wh_ratio=2.0)
    plan = plan_image(3000, 600, config)
    assert (plan.canvas_width, plan.canvas_height) == (math.ceil(1200 / 14) * 14, math.ceil(600 / 14) * 14)
    assert (plan.resized_width, plan.resized_height) == (plan.canvas_width, plan.canvas_height)
    # Exactly at the limit nothing is narrowed, yet the released code stretches.
    at_limit = plan_image(1100, 550, config)
    assert (at_limit.resized_width, at_limit.resized_height) == (at_limit.canvas_width, at_limit.canvas_height)
    below = plan_image(1099, 550, config)
    assert below.resized_height < below.canvas_height or below.resized_width < below.canvas_width


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (-1, 7)])
def test_an_empty_image_is_refused(width, height):
    with pytest.raises(ImageError, match=f"{width} x {height} pixels is empty"):
        plan_image(width, height, RELEASED)


def test_an_image_that_would_shrink_to_nothing_is_refused():
    assert plan_image(1, 10_000, RELEASED).resized_width == 2
    with pytest.raises(ImageError, match="1 x 100000 pixels is too thin: it would be shrunk to 0 x 21462"):
        plan_image(1, 100_000, RELEASED)


def test_grids_keep_partial_cells():
    grid = ImageGrid.of_patches(40, 41, 3)
    assert (grid.rows, grid.columns, grid.cells, grid.tokens) == (14, 14, 196, 14 * 15 + 2)
