import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.vision.builders import RELEASED, TINY, random_image
from v41jax.image_encoder import cell_capacity, largest_patch_count, pack_images, patch_bucket, vision_inputs
from v41jax.image_planning import ImageGrid, plan_image

CONFIGS = st.sampled_from([RELEASED, TINY, dataclasses.replace(TINY, downsample_ratio=2)])


def test_the_ladder_of_the_released_model():
    buckets = sorted({patch_bucket(count, RELEASED) for count in range(1521, 9190)})
    assert buckets == [1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 9216]
    assert largest_patch_count(RELEASED) == plan_image(100_000, 20, RELEASED).grid.patches == 9189


@given(st.integers(1, 9216), CONFIGS)
def test_a_bucket_holds_its_patches_with_little_padding(patches, config):
    if patches > largest_patch_count(config):
        return
    bucket = patch_bucket(patches, config)
    assert bucket >= patches
    assert bucket - patches < max(64, bucket / 4)
    assert patch_bucket(bucket, config) == bucket
    assert bucket <= 1024 or bucket % 256 == 0


def test_too_many_patches_for_one_call_are_refused():
    with pytest.raises(ValueError, match="9217 patches in one call; the largest bucket has 9216"):
        patch_bucket(9217, RELEASED)


@given(st.integers(1, 1200), st.integers(1, 1200), CONFIGS)
@settings(max_examples=200)
def test_the_cells_of_any_planned_image_fit_its_bucket(width, height, config):
    assume(max(width, height) < 200 * min(width, height))  # thinner ones are refused
    grid = plan_image(width, height, config).grid
    assert grid.cells <= cell_capacity(patch_bucket(grid.patches, config), config)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 5))
def test_no_grid_has_more_cells_than_a_line_of_as_many_patches(rows, columns, ratio):
    grid = ImageGrid.of_patches(rows, columns, ratio)
    assert grid.cells <= -(-grid.patches // ratio)


def test_the_arrays_of_a_packed_call():
    first, second = random_image(TINY, 2, 4), random_image(TINY, 4, 1, seed=1)
    inputs = vision_inputs([first, second], TINY)
    assert inputs.segments[:13].tolist() == [0] * 8 + [1] * 4 + [-1]
    np.testing.assert_array_equal(inputs.patches[8:12], second.patches)
    # Cells of the first: one full-height 2 x 3 and one 2 x 1; of the second: 3 x 1 and 1 x 1.
    assert inputs.merge_rows[0][inputs.merge_valid[0]].tolist() == [0, 1, 2, 4, 5, 6]
    assert inputs.merge_rows[1][inputs.merge_valid[1]].tolist() == [3, 7]
    assert inputs.merge_rows[2][inputs.merge_valid[2]].tolist() == [8, 9, 10]
    assert inputs.merge_rows[3][inputs.merge_valid[3]].tolist() == [11]
    assert not inputs.merge_valid[4:].any() and (inputs.merge_rows >= 0).all()
    assert np.isfinite(inputs.cos).all() and np.isfinite(inputs.sin).all()


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=8), st.integers(0, 300))
@settings(max_examples=60, deadline=None)
def test_packing_keeps_order_and_limits(grids, packed_patches):
    images = [random_image(TINY, *grid) for grid in grids]
    groups = list(pack_images(images, TINY, packed_patches))
    assert [id(image) for group in groups for image in group] == [id(image) for image in images]
    for group in groups:
        assert len(group) == 1 or sum(image.grid.patches for image in group) <= packed_patches
        vision_inputs(group, TINY)


def test_cells_limit_a_pack_too():
    thin = [random_image(dataclasses.replace(TINY, max_image_tokens=8), 2, 1)] * 60
    config = dataclasses.replace(TINY, max_image_tokens=8)
    groups = list(pack_images(thin, config, 1000))
    assert {len(group) for group in groups} == {5}, "five cells, the capacity of max_image_tokens - 3"
    with pytest.raises(ValueError, match="6 cells in one call of 64 patches, which holds 5"):
        vision_inputs(thin[:6], config)
