"""Reads and writes page units and STATE images on the device as bytes, in the order of `TransferLayout`.

Reads gather into fresh arrays that any thread may wait for; writes scatter into the donated pools, so that both take
effect in program order with the steps. Each compiled program handles one of a few numbers of units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from scheduler.pool_geometry import V41PoolGeometry
from scheduler.pools import Pools
from scheduler.tiers.layout import TransferLayout
from v41jax.state_copies import Images

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
    """Overwrites STATE images (donated); arguments as `image_contents` gives them, masked rows as for pages."""
    layers, _, *rest = images.window.shape
    return Images(
        _write(images.window, (slice(None), rows), window, (layers, *rest)),
        images.cursor.at[rows].set(cursor, mode="drop"),
    )


class Transfers(NamedTuple):
    """Compiled transfers of a runner's memory: of the pools or images, the data shard that is meant (scalar int32), ids
    inside it, and for a write what `with_pages` and `with_images` take.

    Attributes:
      gather_pages, scatter_pages, gather_images, scatter_images: see `page_contents`, `with_pages`, `image_contents`
        and `with_images`. A gather gives the rows of the shard that is meant, or those of all shards one after the
        other, of which the others mean nothing.
      shards: data shards.
    """

    gather_pages: Callable[..., Array]
    scatter_pages: Callable[..., Pools]
    gather_images: Callable[..., tuple[Array, Array]]
    scatter_images: Callable[..., Images]
    shards: int = 1


TransferName = Literal["gather_pages", "scatter_pages", "gather_images", "scatter_images"]

ONE_DEVICE = Transfers(
    jax.jit(lambda pools, shard, pages: page_contents(pools, pages)),
    jax.jit(lambda pools, shard, *written: with_pages(pools, *written), donate_argnums=0),
    jax.jit(lambda images, shard, rows: image_contents(images, rows)),
    jax.jit(lambda images, shard, *written: with_images(images, *written), donate_argnums=0),
)


class TransferringRunner(Protocol):
    """A runner as far as transfers go; `ModelRunner` is one."""

    num_pages: int

    @property
    def transfers(self) -> Transfers: ...
    @property
    def pools(self) -> Pools: ...
    @property
    def images(self) -> Images: ...
    def replace_pools(self, pools: Pools) -> None: ...
    def replace_images(self, images: Images) -> None: ...
    def transfer(self, name: TransferName, *arguments: Any) -> Any: ...


def run_transfer(runner: TransferringRunner, name: TransferName, *arguments: Any) -> Any:
    """Runs one transfer on a runner's memory; what it writes takes the place of the pools or images.

    Args:
      runner: of the memory.
      name: of the transfer.
      arguments: after the pools or images.

    Returns:
      What a gather reads; None for a scatter.
    """
    pages = name.endswith("pages")
    result = getattr(runner.transfers, name)(runner.pools if pages else runner.images, *arguments)
    if name.startswith("gather"):
        return result
    (runner.replace_pools if pages else runner.replace_images)(result)
    return None


class DevicePages:
    """The `PageMemory` of a runner, of one of its data shards.

    Attributes:
      layout: of the bytes.
    """

    def __init__(self, runner: TransferringRunner, geometry: V41PoolGeometry, shard: int = 0):
        """Nothing is compiled yet.

        Args:
          runner: whose pools and images are read and written.
          geometry: of the pools.
          shard: which data shard's pages these are; ids count inside it.
        """
        self.layout = TransferLayout.of(geometry)
        self._runner = runner
        self._shard = np.int32(shard)

    @property
    def _pages(self) -> int:
        return int(self._runner.num_pages) // self._runner.transfers.shards

    @property
    def _images(self) -> int:
        return int(self._runner.images.cursor.shape[0]) // self._runner.transfers.shards

    def _own(self, rows: Array, asked: int) -> np.ndarray:
        """This shard's rows of a gather of `asked` ids, read from one of the devices that hold them."""
        first = int(self._shard) * asked if rows.shape[0] > asked else 0
        for part in rows.addressable_shards:
            if (part.index[0].start or 0) == first:
                return np.asarray(part.data)
        raise RuntimeError(f"no device of this process holds data shard {self._shard}")

    def warm_up(self, images: bool) -> None:
        """Compiles every transfer; nothing is overwritten."""
        run, unit = self._runner.transfer, self.layout.unit_bytes
        for count in PAGE_BUCKETS:
            run("gather_pages", self._shard, np.zeros(count, np.int32))
            masked = np.full(count, self._pages, np.int32)
            run("scatter_pages", self._shard, masked, np.zeros((count, unit), np.uint8))
        for count in IMAGE_BUCKETS if images else ():
            window, cursor = run("gather_images", self._shard, np.zeros(count, np.int32))
            masked = np.full(count, self._images, np.int32)
            arrays = np.zeros((count, *window.shape[1:]), np.uint8), np.zeros((count, *cursor.shape[1:]), np.int32)
            run("scatter_images", self._shard, masked, *arrays)

    def read_pages(self, pages: Sequence[int]) -> Callable[[], list[bytes]]:
        """Starts to read pages; see `PageMemory`."""
        parts = []
        for ids in _chunks(pages, PAGE_BUCKETS):
            asked = _padded(ids, PAGE_BUCKETS, 0)
            parts.append((self._runner.transfer("gather_pages", self._shard, asked), len(asked), len(ids)))
        return lambda: [row.tobytes() for data, asked, count in parts for row in self._own(data, asked)[:count]]

    def write_pages(self, contents: Mapping[int, bytes]) -> None:
        """Overwrites pages; see `PageMemory`."""
        for ids in _chunks(list(contents), PAGE_BUCKETS):
            places = _padded(ids, PAGE_BUCKETS, self._pages)
            data = np.zeros((len(places), self.layout.unit_bytes), np.uint8)
            for row, page in enumerate(ids):
                data[row] = np.frombuffer(contents[page], np.uint8)
            self._runner.transfer("scatter_pages", self._shard, places, data)

    def read_images(self, images: Sequence[int]) -> Callable[[], list[bytes]]:
        """Starts to read STATE images by row of the image array; see `PageMemory`."""
        parts = []
        for ids in _chunks(images, IMAGE_BUCKETS):
            asked = _padded(ids, IMAGE_BUCKETS, 0)
            parts.append((*self._runner.transfer("gather_images", self._shard, asked), len(asked), len(ids)))

        def result() -> list[bytes]:
            found = []
            for window, cursor, asked, count in parts:
                cursors = self._own(cursor, asked).astype("<i8")
                rows = zip(self._own(window, asked)[:count], cursors[:count], strict=True)
                found += [ring.tobytes() + history.tobytes() for ring, history in rows]
            return found

        return result

    def write_images(self, contents: Mapping[int, bytes]) -> None:
        """Overwrites STATE images; see `PageMemory`."""
        rings = self.layout.image[0].bytes
        for ids in _chunks(list(contents), IMAGE_BUCKETS):
            places = _padded(ids, IMAGE_BUCKETS, self._images)
            window = np.zeros((len(places), rings), np.uint8)
            cursor = np.zeros((len(places), self._runner.images.cursor.shape[1]), np.int32)
            for place, row in enumerate(ids):
                window[place] = np.frombuffer(contents[row], np.uint8, rings)
                cursor[place] = np.frombuffer(contents[row], "<i8", offset=rings)
            self._runner.transfer("scatter_images", self._shard, places, window, cursor)


def _chunks(ids: Sequence[int], buckets: tuple[int, ...]) -> list[Sequence[int]]:
    return [ids[start : start + buckets[-1]] for start in range(0, len(ids), buckets[-1])]


def _padded(ids: Sequence[int], buckets: tuple[int, ...], filling: int) -> np.ndarray:
    size = next(bucket for bucket in buckets if bucket >= len(ids))
    return np.asarray([*ids, *[filling] * (size - len(ids))], np.int32)
