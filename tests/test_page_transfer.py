"""Page units and STATE images as bytes, against the arrays they come from."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scheduler.pool_geometry import V41PoolGeometry
from scheduler.pools import allocate
from v41jax.page_transfer import ONE_DEVICE, DevicePages, page_planes, run_transfer
from v41jax.state_copies import allocate_images

PAGES, SLOTS, IMAGES = 11, 2, 3
FORMATS = {
    "bf16, fp8 keys": {},
    "bf16, fp4 keys": {"index_format": "fp4"},
    "packed": {"packed": True},
    "packed, fp4 keys": {"packed": True, "index_format": "fp4"},
    "float32": {"unquantized_dtype": "float32"},
    "bfloat16": {"unquantized_dtype": "bfloat16"},
}


class Runner(types.SimpleNamespace):
    transfers, transfer = ONE_DEVICE, run_transfer

    def replace_pools(self, pools):
        self.pools = pools

    def replace_images(self, images):
        self.images = images


def random_leaf(leaf, seed):
    """Any bit patterns, NaNs included."""
    bits = np.random.default_rng(seed).integers(0, 256, (*leaf.shape, leaf.dtype.itemsize), np.uint8)
    return jnp.asarray(bits.view(leaf.dtype)[..., 0])


@pytest.fixture(params=FORMATS.values(), ids=FORMATS)
def memory(request):
    geometry = V41PoolGeometry(4, ((1, 2), (2, 1)), 32, 32, 64, 32, **request.param)
    pools = allocate(geometry, PAGES, SLOTS)
    images = allocate_images(geometry, pools, IMAGES)
    leaves, tree = jax.tree.flatten((pools, images))
    pools, images = jax.tree.unflatten(tree, [random_leaf(leaf, seed) for seed, leaf in enumerate(leaves)])
    return DevicePages(Runner(pools=pools, images=images, num_pages=PAGES), geometry)


def host(tree):
    return jax.tree.map(np.array, tree)


def test_planes_lie_where_the_layout_says(memory):
    planes = host(page_planes(memory._runner.pools))
    pages = [7, 0, PAGES - 1]
    for page, data in zip(pages, memory.read_pages(pages)(), strict=True):
        assert len(data) == memory.layout.unit_bytes
        for span, plane in zip(memory.layout.page, planes, strict=True):
            assert data[span.offset : span.offset + span.bytes] == plane[page].tobytes(), span.name
            assert (span.shape, span.bytes) == (plane.shape[1:], plane[page].nbytes)
    row = memory.layout.image
    images = host(memory._runner.images)
    for index, data in zip((2, 0), memory.read_images([2, 0])(), strict=True):
        assert len(data) == memory.layout.image_bytes
        assert data[: row[0].bytes] == images.window[:, index].tobytes()
        assert np.frombuffer(data, "<i8", offset=row[1].offset).tolist() == images.cursor[index].tolist()


def test_written_pages_are_what_was_read_and_nothing_else_changes(memory):
    before = host(memory._runner.pools)
    one, two = memory.read_pages([3, 5])()
    memory.write_pages({4: one, 10: two})
    after = host(memory._runner.pools)
    assert memory.read_pages([4, 10, 3, 5])() == [one, two, one, two]
    for old, new in zip(page_planes(before), page_planes(after), strict=True):
        others = [page for page in range(PAGES) if page not in (4, 10)]
        assert old[others].tobytes() == new[others].tobytes()
    names = ("window", "tail_kv", "tail_score", "cursor", "last_token")
    rest = [[getattr(pools, name).tobytes() for name in names] for pools in (before, after)]
    assert rest[0] == rest[1]
    many = {page: one for page in range(PAGES)}
    memory.write_pages(many)
    assert memory.read_pages(list(range(PAGES)))() == [one] * PAGES


def test_written_images_are_what_was_read(memory):
    first, second = memory.read_images([0, 1])()
    memory.write_images({2: first, 0: second})
    assert memory.read_images([0, 1, 2])() == [second, second, first]


def test_warming_up_changes_nothing(memory):
    before = [leaf.tobytes() for leaf in jax.tree.leaves(host((memory._runner.pools, memory._runner.images)))]
    memory.warm_up(images=True)
    after = [leaf.tobytes() for leaf in jax.tree.leaves(host((memory._runner.pools, memory._runner.images)))]
    assert before == after


def test_a_read_is_of_the_moment_it_was_asked_for(memory):
    (old,) = memory.read_pages([1])()
    read = memory.read_pages([1])
    (other,) = memory.read_pages([2])()
    memory.write_pages({1: other})
    assert read() == [old] != [other]
