"""Tower and aligner: `layers/vision.py` against the specification, the float64 reference and the golden embeddings."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints.load import Checkpoint
from tests.vision.builders import (
    GOLDEN,
    RELEASED,
    TEXT_HIDDEN,
    TINY,
    golden_image,
    random_image,
    random_tensors,
    tensor_shapes,
    tensor_source,
)
from v41jax.image_encoder import encode_images, rotary_angles, vision_inputs
from v41jax.image_planning import ImageGrid
from v41jax.layers import vision as layers
from v41jax.precision import Precision
from v41jax.presets import preset
from v41jax.reference import vision as reference
from v41jax.vision_parameters import DELIMITERS, vision_parameters

FLOAT32 = Precision(activation_dtype=jnp.float32)
BFLOAT16 = Precision()


def reference_rows(tensors, image, config):
    return reference.encode_image(tensors, image.patches, image.grid.patch_rows, image.grid.patch_columns, config)


@pytest.fixture(scope="module", params=["pico", "five-layer"])
def golden(request):
    """Configuration, parameters, tensors, image and recorded embeddings of a golden checkpoint."""
    with Checkpoint.open(GOLDEN / request.param, scopes=("vision",)) as checkpoint:
        parameters = vision_parameters(checkpoint)
        tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.names}
        config = checkpoint.config.vision
    image, recorded = golden_image(request.param)
    return config, parameters, tensors, image, recorded


def test_golden_embeddings(golden):
    config, parameters, tensors, image, recorded = golden
    assert config.projector_hidden_act == "gelu_pytorch_tanh"
    (rows,) = encode_images(parameters, [image], config, FLOAT32)
    for mode in ("quant", "noquant"):
        expected = recorded[f"{mode}.float32.image_embeds"]
        np.testing.assert_allclose(rows, expected, rtol=0, atol=5e-6)
        np.testing.assert_allclose(reference_rows(tensors, image, config), expected, rtol=0, atol=5e-6)


def test_the_released_activation_is_the_exact_gelu(golden):
    config, parameters, tensors, image, recorded = golden
    config = dataclasses.replace(config, projector_hidden_act=preset("v4.1-flash").vision.projector_hidden_act)
    (rows,) = encode_images(parameters, [image], config, FLOAT32)
    np.testing.assert_allclose(rows, reference_rows(tensors, image, config), rtol=0, atol=5e-6)
    assert 5e-5 < np.abs(rows - recorded["noquant.float32.image_embeds"]).max() < 5e-4
    x = np.array([-3.0, -0.5, 0.0, 1.0, 2.5])
    exact = [value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in x]
    np.testing.assert_allclose(reference.gelu(x, "gelu"), exact, rtol=1e-15)
    np.testing.assert_allclose(layers.gelu(jnp.asarray(x, jnp.float32), "gelu"), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("grid", [(1, 1), (3, 3), (4, 10), (11, 2), (1, 63)])
@pytest.mark.parametrize("config", [TINY, preset("odd").vision], ids=["tiny", "odd"])
def test_float32_rows_equal_the_reference(config, grid):
    tensors = random_tensors(config)
    image = random_image(config, *grid)
    (rows,) = encode_images(vision_parameters(tensor_source(config, tensors)), [image], config, FLOAT32)
    expected = reference_rows(tensors, image, config)
    assert rows.shape == (image.grid.cells, TEXT_HIDDEN) == expected.shape
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_bfloat16_rows_stay_near_the_reference():
    tensors = random_tensors(TINY)
    image = random_image(TINY, 8, 7)
    (rows,) = encode_images(vision_parameters(tensor_source(TINY, tensors)), [image], TINY, BFLOAT16)
    expected = reference_rows(tensors, image, TINY)
    assert rows.dtype == ml_dtypes.bfloat16
    error = rows.astype(np.float64) - expected
    assert np.sqrt(np.mean(error**2)) < 2**-7 * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_packed_images_equal_images_one_at_a_time(precision):
    parameters = vision_parameters(tensor_source(TINY, random_tensors(TINY)))
    images = [random_image(TINY, *grid, seed=seed) for seed, grid in enumerate([(3, 3), (5, 7), (1, 4), (6, 2)])]
    packed = encode_images(parameters, images, TINY, precision, packed_patches=128)
    single = [encode_images(parameters, [image], TINY, precision)[0] for image in images]
    for ours, theirs in zip(packed, single, strict=True):
        # Only the length of the reductions differs.
        np.testing.assert_allclose(
            ours.astype(np.float32), theirs.astype(np.float32), atol=2e-5 if precision is FLOAT32 else 2e-2
        )


def test_padding_changes_nothing_whatever_it_holds():
    parameters = vision_parameters(tensor_source(TINY, random_tensors(TINY)))
    image = random_image(TINY, 5, 7)
    inputs = vision_inputs([image], TINY)
    poisoned = inputs._replace(patches=inputs.patches.copy())
    poisoned.patches[image.grid.patches :] = np.nan
    for arrays in (inputs, poisoned):
        rows = layers.encode_patches(parameters, arrays, config=TINY, precision=FLOAT32)
        assert np.isfinite(rows).all()
        np.testing.assert_array_equal(
            rows[: image.grid.cells],
            layers.encode_patches(parameters, inputs, config=TINY, precision=FLOAT32)[: image.grid.cells],
        )


def test_attention_by_query_blocks_equals_attention_at_once(monkeypatch):
    images = [random_image(TINY, 5, 7), random_image(TINY, 4, 4, seed=1)]
    inputs = vision_inputs(images, TINY)
    qkv = jax.random.normal(jax.random.key(0), (len(inputs.segments), 3 * TINY.hidden_size))
    whole = layers.attention(qkv, inputs, TINY.num_attention_heads)
    monkeypatch.setattr(layers, "QUERY_BLOCK", 8)
    blocked = layers.attention(qkv, inputs, TINY.num_attention_heads)
    np.testing.assert_allclose(blocked, whole, atol=1e-6)
    assert (np.asarray(whole[51:]) == 0).all(), "padding attends to nothing"


def test_images_of_a_pack_do_not_see_each_other():
    first, second, other = (random_image(TINY, 4, 4, seed=seed) for seed in range(3))
    parameters = vision_parameters(tensor_source(TINY, random_tensors(TINY)))
    one = encode_images(parameters, [first, second], TINY, FLOAT32)
    two = encode_images(parameters, [first, other], TINY, FLOAT32)
    np.testing.assert_array_equal(one[0], two[0])
    assert np.abs(one[1] - two[1]).max() > 0.1


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_rotated_dot_products_depend_on_differences_only(y, x, down, right):
    rng = np.random.default_rng(0)
    query, key = rng.standard_normal((2, 64)).astype(np.float32)
    angles = rotary_angles(ImageGrid.of_patches(64, 64, 3), RELEASED).reshape(64, 64, 32)

    def rotated(vector, row, column):
        angle = angles[row, column][None]
        return np.asarray(layers.rotate(jnp.asarray(vector)[None, None], np.cos(angle), np.sin(angle)))[0, 0]

    here = rotated(query, y, x) @ rotated(key, y + 3, x + 5)
    moved = rotated(query, y + down, x + right) @ rotated(key, y + down + 3, x + right + 5)
    np.testing.assert_allclose(here, moved, atol=2e-4)
    np.testing.assert_allclose(
        rotated(query, y, x), reference.rotate(query[None], angles[y, x][None].astype(np.float64))[0], atol=1e-5
    )


@pytest.mark.parametrize("lane", [0, 5, 15, 16, 31, 32, 47, 63])
def test_lane_i_is_paired_with_lane_i_plus_32(lane):
    row, column = 7, 11
    angle = rotary_angles(ImageGrid.of_patches(12, 12, 3), RELEASED)[row * 12 + column][None]
    vector = jnp.zeros((1, 1, 64)).at[0, 0, lane].set(1)
    rotated = np.asarray(layers.rotate(vector, np.cos(angle), np.sin(angle)))[0, 0]
    pair, frequency = lane % 32, 10000.0 ** (-2 * (lane % 16) / 32)
    theta = (row if pair < 16 else column) * frequency
    expected = np.zeros(64)
    if lane < 32:
        expected[[lane, lane + 32]] = math.cos(theta), math.sin(theta)
    else:
        expected[[lane - 32, lane]] = -math.sin(theta), math.cos(theta)
    np.testing.assert_allclose(rotated, expected, atol=1e-6)


@given(st.integers(1, 8), st.integers(1, 8), st.data())
@settings(max_examples=40, deadline=None)
def test_one_feature_lands_at_its_channel_major_place(height, width, data):
    y, x = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    channel, channels = data.draw(st.integers(0, 4)), 5
    grid = ImageGrid.of_patches(height, width, 3)
    inputs = vision_inputs([random_image(TINY, height, width)], TINY)
    features = np.full((len(inputs.segments), channels), np.nan, np.float32)  # rows of padding must not be read
    features[: grid.patches] = 0
    features[y * width + x, channel] = 1
    cells = np.asarray(layers.merge_cells(jnp.asarray(features), inputs.merge_rows, inputs.merge_valid))
    expected = np.zeros((grid.cells, 9 * channels))
    expected[(y // 3) * grid.columns + x // 3, channel * 9 + (y % 3) * 3 + x % 3] = 1
    np.testing.assert_array_equal(cells[: grid.cells], expected)
    np.testing.assert_array_equal(
        reference.merge_cells(features[: grid.patches].reshape(height, width, channels), 3), expected
    )


def test_image_rows_replace_token_embeddings_and_padding_writes_nothing():
    embeddings = jnp.zeros((6, 2), jnp.bfloat16)
    rows = np.array([[1, 2], [3, 4], [np.nan, np.nan]], np.float32)
    written = layers.write_image_rows(embeddings, rows, np.array([4, 0, 6], np.int32))
    assert written.dtype == jnp.bfloat16
    assert written.astype(np.float32).tolist() == [[3, 4], [0, 0], [0, 0], [0, 0], [1, 2], [0, 0]]


def test_norms_are_float32_with_their_own_epsilon():
    x = jnp.full((1, 4), 1e-3, jnp.bfloat16)
    expected = float(x[0, 0]) / math.sqrt(float(x[0, 0]) ** 2 + 1e-6) * 3
    rows = layers.rms_norm(x, jnp.full(4, 3, jnp.bfloat16))
    assert rows.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(rows, np.float32), expected, rtol=2**-8)


def test_parameters_follow_the_checkpoint_names():
    tensors = random_tensors(TINY)
    parameters = vision_parameters(tensor_source(TINY, tensors))
    assert sum(leaf.size for leaf in jax.tree.leaves(parameters)) == sum(t.size for t in tensors.values())
    np.testing.assert_array_equal(parameters.blocks.wqkv.bias[1], tensors["vision.blocks.1.attn.wqkv.bias"])
    np.testing.assert_array_equal(parameters.blocks.w2[0], tensors["vision.blocks.0.mlp.w2.weight"])
    for row, name in zip(parameters.delimiters, DELIMITERS, strict=True):
        np.testing.assert_array_equal(row, tensors[name])


def test_float32_delimiters_are_read_as_bfloat16():
    tensors = random_tensors(TINY)
    tensors["image_end"] = tensors["image_end"].astype(np.float32)
    assert vision_parameters(tensor_source(TINY, tensors)).delimiters.dtype == ml_dtypes.bfloat16


def test_the_released_size_traces_with_485_million_parameters():
    assert preset("v4.1-flash").vision == RELEASED
    shapes = tensor_shapes(RELEASED, text_hidden=5120)
    assert len(shapes) == 266
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(485.3e6, rel=1e-4)
    tensors = {name: np.broadcast_to(ml_dtypes.bfloat16(0), shape) for name, shape in shapes.items()}
    one_block = {**vars(RELEASED), "num_hidden_layers": 1}
    config = type(RELEASED)(**one_block)
    parameters = vision_parameters(tensor_source(config, tensors))
    image = random_image(config, 81, 108)
    inputs = vision_inputs([image], config)
    rows = jax.eval_shape(
        lambda p, i: layers.encode_patches(p, i, config=config, precision=BFLOAT16), parameters, inputs
    )
    assert rows.shape == (1021, 5120) and rows.dtype == jnp.bfloat16
    assert len(inputs.segments) == 9216
