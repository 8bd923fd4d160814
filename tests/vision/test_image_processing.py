import io
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from tests.vision.builders import RELEASED, TINY, encoded, png, random_picture
from v41jax.image_planning import ImageError, plan_image
from v41jax.image_processing import (
    ImageLimits,
    decode_image,
    image_from_arrays,
    image_size,
    image_token_count,
    process_image,
    process_pixels,
)


def pillow_pipeline(picture: Image.Image, config) -> np.ndarray:
    """The released pixel rules through Pillow's own padding, patches cut one by one."""
    plan = plan_image(*picture.size, config)
    canvas = ImageOps.pad(picture, (plan.canvas_width, plan.canvas_height), color=(127, 127, 127))
    pixels = ((np.asarray(canvas).astype(np.float32) / 255 - 0.5) / 0.5).transpose(2, 0, 1)
    side = config.patch_size
    patches = [
        pixels[:, y : y + side, x : x + side].reshape(-1)
        for y in range(0, plan.canvas_height, side)
        for x in range(0, plan.canvas_width, side)
    ]
    return np.stack(patches).astype(ml_dtypes.bfloat16)


def bits(array: np.ndarray) -> np.ndarray:
    return np.asarray(array).view(np.uint16)


@pytest.mark.parametrize(
    "size", [(1, 1), (31, 517), (4000, 40), (400, 900), (999, 701), (1, 10_000), (640, 480), (2500, 2500)]
)
def test_patches_equal_the_pillow_pipeline_bit_for_bit(size):
    picture = random_picture(*size)
    image = process_image(encoded(picture, compress_level=0), RELEASED)
    assert image.patches.dtype == ml_dtypes.bfloat16
    assert image.grid.tokens == image_token_count(*size, RELEASED)
    np.testing.assert_array_equal(bits(image.patches), bits(pillow_pipeline(picture, RELEASED)))


@given(st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_every_small_size_equals_the_pillow_pipeline(width, height):
    picture = random_picture(width, height)
    np.testing.assert_array_equal(bits(process_pixels(picture, TINY).patches), bits(pillow_pipeline(picture, TINY)))


def test_padding_rows_hold_the_canvas_colour():
    image = process_pixels(Image.new("RGB", (100, 50), (255, 0, 255)), RELEASED)
    rows = image.patches.astype(np.float32).reshape(28, 55, 3, 14, 14).transpose(2, 0, 3, 1, 4).reshape(3, 392, 770)
    grey = float(np.float32((127 / 255 - 0.5) / 0.5).astype(ml_dtypes.bfloat16))
    assert (rows[:, :4] == grey).all() and (rows[:, 389:] == grey).all()
    assert (rows[0, 4:389] == 1).all() and (rows[1, 4:389] == -1).all()


def test_a_patch_is_flattened_channel_row_column():
    picture = Image.new("RGB", (20, 20))
    # Canvas equals the picture: patch row 3, patch column 7, inside it row 1, column 0.
    picture.putpixel((14, 7), (0, 255, 0))
    image = process_pixels(picture, TINY)
    patch, element = np.argwhere(image.patches.astype(np.float32) == 1)[0]
    assert (patch, element) == (3 * 10 + 7, 1 * 4 + 1 * 2 + 0)
    assert int((image.patches.astype(np.float32) == 1).sum()) == 1


def test_arrays_processed_elsewhere_must_follow_the_configuration():
    patches = np.arange(35 * 12, dtype=np.float32).reshape(35, 3, 2, 2)
    image = image_from_arrays(patches, np.array([5, 7, 2, 3]), TINY)
    np.testing.assert_array_equal(image.patches, patches.reshape(35, 12))
    assert patches.flags.writeable, "the caller's array stays its own"
    for grid in ([5, 7, 2, 4], [5, 7, 1, 3], [5], [5, 7, 2, 3, 1]):
        with pytest.raises(ImageError, match=r"does not follow|it holds patch rows"):
            image_from_arrays(patches, grid, TINY)
    with pytest.raises(ImageError, match=r"shape \(35, 3, 2, 2\); grid \[7, 6, 3, 2\] needs \(42, 3, 2, 2\)"):
        image_from_arrays(patches, [7, 6, 3, 2], TINY)


def test_patches_are_read_only():
    with pytest.raises(ValueError):
        process_pixels(Image.new("RGB", (9, 9)), TINY).patches[0, 0] = 0


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_each_accepted_format_decodes_as_pillow_does(file_format):
    data = encoded(random_picture(40, 30), file_format)
    assert image_size(data) == (40, 30)
    assert decode_image(data).tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


@pytest.mark.filterwarnings("ignore:Palette images")  # of the expected value, not of ours
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA"])
def test_alpha_palettes_and_grey_convert_as_pillow_does(mode):
    data = encoded(random_picture(40, 30, "RGBA").convert(mode))
    assert Image.open(io.BytesIO(data)).mode == mode
    assert decode_image(data).tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_alpha_is_dropped_and_not_blended():
    assert decode_image(encoded(Image.new("RGBA", (3, 3), (10, 20, 30, 0)))).getpixel((1, 1)) == (10, 20, 30)


def test_palette_transparency_gives_neither_a_warning_nor_another_colour():
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette([0, 0, 0, 9, 8, 7])
    data = encoded(picture, transparency=bytes([0, 128]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_image(data).getpixel((0, 0)) == (9, 8, 7)


def test_cmyk_converts_as_pillow_does():
    data = encoded(random_picture(40, 30, "CMYK"), "JPEG")
    assert Image.open(io.BytesIO(data)).mode == "CMYK"
    assert decode_image(data).tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_exif_rotation_is_not_applied():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to show upright
    data = encoded(random_picture(40, 30), "JPEG", exif=exif)
    assert decode_image(data).size == image_size(data) == (40, 30)


def test_16_bit_colour_keeps_the_high_byte():
    row = b"\0" + bytes.fromhex("12ff 3400 56aa")
    assert decode_image(png(1, 1, row, depth=16)).getpixel((0, 0)) == (0x12, 0x34, 0x56)


def test_16_bit_grey_is_refused():
    with pytest.raises(ImageError, match=r"'I;16', more than 8 bits a channel.*convert it to 8-bit RGB"):
        decode_image(encoded(Image.new("I;16", (4, 4))))


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_refused(file_format):
    frames = [random_picture(20, 20, seed=seed) for seed in range(3)]
    data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match=f"{file_format} image is animated; only still images"):
        process_image(data, TINY)


def test_a_multi_picture_jpeg_gives_its_first_picture():
    first = random_picture(20, 20)
    data = encoded(first, "MPO", save_all=True, append_images=[random_picture(20, 20, seed=1)])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert decode_image(data).tobytes() == decode_image(encoded(first, "JPEG")).tobytes()


@pytest.mark.parametrize("file_format", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_truncated_file_is_refused(file_format):
    data = encoded(random_picture(64, 64), file_format)
    with pytest.raises(ImageError, match=r"truncated or damaged|no readable image"):
        decode_image(data[: len(data) // 2])


@pytest.mark.parametrize("file_format", ["TIFF", "ICO", "PPM", "TGA"])
def test_other_formats_of_pillow_stay_closed(file_format):
    with pytest.raises(ImageError, match="no readable image; accepted formats are PNG, JPEG"):
        decode_image(encoded(random_picture(16, 16), file_format))


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"\xff\xd8\xff"])
def test_what_is_no_image_is_refused(data):
    with pytest.raises(ImageError, match="no readable image"):
        decode_image(data)


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_a_decompression_bomb_is_refused_from_its_header(side):
    # Under Pillow's own limit, in the range where it only warns, and where it raises.
    bomb = png(side, side, b"\0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ImageError, match=r"at most 64000000 pixels are accepted; send a smaller one"):
            process_image(bomb, RELEASED)


def test_the_byte_limit_is_named():
    with pytest.raises(ImageError, match="has 101 bytes; at most 100 are accepted"):
        decode_image(bytes(101), ImageLimits(max_bytes=100))


def test_a_thin_image_is_refused_before_it_is_decoded():
    # A valid header over rows that could not be decoded: the plan fails first.
    with pytest.raises(ImageError, match="too thin"):
        process_image(png(1, 500_000, b""), RELEASED)


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1)])
def test_a_line_of_ten_thousand_pixels_is_the_largest_image_the_model_takes(size):
    data = encoded(random_picture(*size))
    image = process_image(data, RELEASED)
    assert image.grid.tokens == image_token_count(*image_size(data), RELEASED) == 1024
    assert image.patches.shape == (image.grid.patches, 588)


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_arbitrary_bytes_raise_only_image_errors(data):
    with pytest.raises(ImageError):
        process_image(data, TINY)


@given(st.sampled_from(["PNG", "JPEG", "WEBP", "GIF", "BMP"]), st.data())
@settings(max_examples=120, deadline=None)
def test_damaged_files_raise_only_image_errors(file_format, data):
    file = bytearray(encoded(random_picture(24, 24), file_format))
    for _ in range(data.draw(st.integers(1, 6))):
        file[data.draw(st.integers(0, min(len(file) - 1, 120)))] = data.draw(st.integers(0, 255))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = process_image(bytes(file), TINY, ImageLimits(max_pixels=10_000))
        except ImageError:
            return
    assert image.grid.tokens <= TINY.max_image_tokens


def test_a_missing_pillow_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImageError, match=r"images need Pillow.*install v41jax\[vision\]"):
        decode_image(b"")
