"""Reads and writes page units and STATE images on the device as bytes, in the order of `TransferLayout`.

Reads gather into fresh arrays that any thread may wait for; writes scatter into the donated pools, so that both take
effect in program order with the steps. Each compiled program handles one of a few numbers of units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from scheduler.pool_geometry import V41PoolGeometry
from scheduler.pools import Pools
from scheduler.tiers.layout import TransferLayout
from v41jax.state_copies import Images

if TYPE_CHECKING:
    from v41jax.runner import ModelRunner

PAGE_BUCKETS = (1, 8, 64)
"""Pages that one compiled transfer moves."""
IMAGE_BUCKETS = (1,)


def _to_bytes(rows: Array) -> Array:
    """[n, ..] any dtype -> [n, bytes] uint8, least significant byte first."""
    return lax.bitcast_convert_type(rows, jnp.uint8).reshape(rows.shape[0], -1)


def _from_bytes(data: Array, shape: tuple[int, ...], dtype: jnp.dtype) -> Array:
    """[n, bytes] uint8 -> [n, *shape] of `dtype`."""
    size = jnp.dtype(dtype).itemsize
    parts = data.reshape(data.shape[0], *shape, *((size,) if size > 1 else ()))
    return lax.bitcast_convert_type(parts, dtype)


def _write(plane: Array, index: tuple[Array | slice, ...], data: Array, shape: tuple[int, ...]) -> Array:
    """`plane` with entries replaced by [n, bytes] uint8, bit for bit."""
    dtype = plane.dtype
    if dtype == jnp.bfloat16 and jax.default_backend() == "cpu":
        # XLA's CPU scatter widens bfloat16, which quiets NaNs; as integers nothing is touched.
        bits = lax.bitcast_convert_type(plane, jnp.uint16)
        return lax.bitcast_convert_type(_write(bits, index, data, shape), dtype)
    rows = _from_bytes(data, shape, dtype)
    axis = len(index) - 1
    return plane.at[index].set(jnp.moveaxis(rows, 0, axis), mode="drop")


def page_planes(pools: Pools) -> list[Array]:
    """Page planes in transfer order: main rows of every owner, then each owner's index values and scales."""
    planes = list(pools.main)
    for values, scales in zip(pools.index_values, pools.index_scales, strict=True):
        planes += [values] if scales is None else [values, scales]
    return planes


def _replaced(pools: Pools, planes: list[Array]) -> Pools:
    rest = iter(planes)
    main = tuple(next(rest) for _ in pools.main)
    values, scales = [], []
    for old in pools.index_scales:
        values.append(next(rest))
        scales.append(None if old is None else next(rest))
    return pools.replace(main=main, index_values=tuple(values), index_scales=tuple(scales))


def page_contents(pools: Pools, pages: Array) -> Array:
    """Contents of pages.

    Args:
      pools: read only.
      pages: [n] int32; out-of-range entries give some page.

    Returns:
      [n, unit_bytes] uint8.
    """
    return jnp.concatenate([_to_bytes(plane.at[pages].get(mode="clip")) for plane in page_planes(pools)], axis=1)


def with_pages(pools: Pools, pages: Array, data: Array) -> Pools:
    """Overwrites pages.

    Args:
      pools: donated.
      pages: [n] int32, distinct; a masked destination is the number of pages, or more.
      data: [n, unit_bytes] uint8.
    """
    planes, offset = [], 0
    for plane in page_planes(pools):
        size = plane.dtype.itemsize * int(np.prod(plane.shape[1:]))
        planes.append(_write(plane, (pages,), data[:, offset : offset + size], plane.shape[1:]))
        offset += size
    return _replaced(pools, planes)


def image_contents(images: Images, rows: Array) -> tuple[Array, Array]:
    """Contents of STATE images: ([n, ring bytes] uint8, [n, 1 + Hh] int32 cursors)."""
    window = jnp.moveaxis(images.window.at[:, rows].get(mode="clip"), 1, 0)
    return _to_bytes(window), images.cursor.at[rows].get(mode="clip")


def with_images(images: Images, rows: Array, window: Array, cursor: Array) -> Images:
    """Overwrites STATE images (donated); arguments as `gather_images` gives them, masked rows as for pages."""
    layers, _, *rest = images.window.shape
    return Images(
        _write(images.window, (slice(None), rows), window, (layers, *rest)),
        images.cursor.at[rows].set(cursor, mode="drop"),
    )


gather_pages = jax.jit(page_contents)
scatter_pages = jax.jit(with_pages, donate_argnums=0)
gather_images = jax.jit(image_contents)
scatter_images = jax.jit(with_images, donate_argnums=0)


class Transfers(NamedTuple):
    """Compiled transfers of a runner's memory; of several data shards all ids count inside their shard, and arguments
    and results are those of the shards, one after the other.

    Attributes:
      gather_pages, scatter_pages, gather_images, scatter_images: see `page_contents`, `with_pages`, `image_contents`
        and `with_images`.
      shards: data shards.
    """

    gather_pages: Callable[..., Array]
    scatter_pages: Callable[..., Pools]
    gather_images: Callable[..., tuple[Array, Array]]
    scatter_images: Callable[..., Images]
    shards: int = 1


ONE_DEVICE = Transfers(gather_pages, scatter_pages, gather_images, scatter_images)


class DevicePages:
    """The `PageMemory` of a runner, of one of its data shards.

    Attributes:
      layout: of the bytes.
    """

    def __init__(
        self, runner: ModelRunner, geometry: V41PoolGeometry, transfers: Transfers = ONE_DEVICE, shard: int = 0
    ):
        """Nothing is compiled yet.

        Args:
          runner: whose pools and images are read and written.
          geometry: of the pools.
          transfers: of the runner's memory.
          shard: which data shard's pages these are; ids count inside it.
        """
        self.layout = TransferLayout.of(geometry)
        self._runner = runner
        self._transfers = transfers
        self._shard = shard

    @property
    def _pages(self) -> int:
        return int(self._runner.num_pages) // self._transfers.shards

    @property
    def _images(self) -> int:
        return int(self._runner.images.cursor.shape[0]) // self._transfers.shards

    def _spread(self, ids: Sequence[int], buckets: tuple[int, ...], filling: int) -> np.ndarray:
        """Ids of all shards for one program: this shard's, and of the others what is masked."""
        own = _padded(ids, buckets, filling)
        whole = np.full((self._transfers.shards, len(own)), filling, np.int32)
        whole[self._shard] = own
        return whole.reshape(-1)

    def _first(self, places: np.ndarray) -> int:
        """Where this shard's part of the places begins."""
        return self._shard * (len(places) // self._transfers.shards)

    def _own(self, rows: Array) -> np.ndarray:
        """This shard's part of a result, read from one of the devices that hold it."""
        count = rows.shape[0] // self._transfers.shards
        for part in rows.addressable_shards:
            if (part.index[0].start or 0) == self._shard * count:
                return np.asarray(part.data)
        raise RuntimeError(f"no device of this process holds data shard {self._shard}")

    def warm_up(self, images: bool) -> None:
        """Compiles every transfer; nothing is overwritten."""
        unit = self.layout.unit_bytes
        for count in PAGE_BUCKETS:
            count *= self._transfers.shards
            self._transfers.gather_pages(self._runner.pools, np.zeros(count, np.int32))
            masked = np.full(count, self._pages, np.int32)
            data = np.zeros((count, unit), np.uint8)
            self._runner.replace_pools(self._transfers.scatter_pages(self._runner.pools, masked, data))
        for count in IMAGE_BUCKETS if images else ():
            count *= self._transfers.shards
            window, cursor = self._transfers.gather_images(self._runner.images, np.zeros(count, np.int32))
            masked = np.full(count, self._images, np.int32)
            arrays = np.zeros(window.shape, np.uint8), np.zeros(cursor.shape, np.int32)
            self._runner.replace_images(self._transfers.scatter_images(self._runner.images, masked, *arrays))

    def read_pages(self, pages: Sequence[int]) -> Callable[[], list[bytes]]:
        """Starts to read pages; see `PageMemory`."""
        parts = []
        for ids in _chunks(pages, PAGE_BUCKETS):
            places = self._spread(ids, PAGE_BUCKETS, 0)
            parts.append((self._transfers.gather_pages(self._runner.pools, places), len(ids)))
        return lambda: [row.tobytes() for data, count in parts for row in self._own(data)[:count]]

    def write_pages(self, contents: Mapping[int, bytes]) -> None:
        """Overwrites pages; see `PageMemory`."""
        for ids in _chunks(list(contents), PAGE_BUCKETS):
            places = self._spread(ids, PAGE_BUCKETS, self._pages)
            data = np.zeros((len(places), self.layout.unit_bytes), np.uint8)
            for row, page in enumerate(ids, self._first(places)):
                data[row] = np.frombuffer(contents[page], np.uint8)
            self._runner.replace_pools(self._transfers.scatter_pages(self._runner.pools, places, data))

    def read_images(self, images: Sequence[int]) -> Callable[[], list[bytes]]:
        """Starts to read STATE images by row of the image array; see `PageMemory`."""
        parts = []
        for ids in _chunks(images, IMAGE_BUCKETS):
            places = self._spread(ids, IMAGE_BUCKETS, 0)
            parts.append((*self._transfers.gather_images(self._runner.images, places), len(ids)))

        def result() -> list[bytes]:
            found = []
            for window, cursor, count in parts:
                cursors = self._own(cursor).astype("<i8")
                rows = zip(self._own(window)[:count], cursors[:count], strict=True)
                found += [ring.tobytes() + history.tobytes() for ring, history in rows]
            return found

        return result

    def write_images(self, contents: Mapping[int, bytes]) -> None:
        """Overwrites STATE images; see `PageMemory`."""
        rings = self.layout.image[0].bytes
        for ids in _chunks(list(contents), IMAGE_BUCKETS):
            places = self._spread(ids, IMAGE_BUCKETS, self._images)
            window = np.zeros((len(places), rings), np.uint8)
            cursor = np.zeros((len(places), self._runner.images.cursor.shape[1]), np.int32)
            for place, row in enumerate(ids, self._first(places)):
                window[place] = np.frombuffer(contents[row], np.uint8, rings)
                cursor[place] = np.frombuffer(contents[row], "<i8", offset=rings)
            self._runner.replace_images(self._transfers.scatter_images(self._runner.images, places, window, cursor))


def _chunks(ids: Sequence[int], buckets: tuple[int, ...]) -> list[Sequence[int]]:
    return [ids[start : start + buckets[-1]] for start in range(0, len(ids), buckets[-1])]


def _padded(ids: Sequence[int], buckets: tuple[int, ...], filling: int) -> np.ndarray:
    size = next(bucket for bucket in buckets if bucket >= len(ids))
    return np.asarray([*ids, *[filling] * (size - len(ids))], np.int32)
