"""Reads and writes page units and STATE images on the device as bytes, in the order of `TransferLayout`.

Reads gather into fresh arrays that any thread may wait for; writes scatter into the donated pools, so that both take
effect in program order with the steps. Each compiled program handles one of a few numbers of units.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

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


@jax.jit
def gather_pages(pools: Pools, pages: Array) -> Array:
    """Contents of pages.

    Args:
      pools: read only.
      pages: [n] int32; out-of-range entries give some page.

    Returns:
      [n, unit_bytes] uint8.
    """
    return jnp.concatenate([_to_bytes(plane.at[pages].get(mode="clip")) for plane in page_planes(pools)], axis=1)


@functools.partial(jax.jit, donate_argnums=0)
def scatter_pages(pools: Pools, pages: Array, data: Array) -> Pools:
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


@jax.jit
def gather_images(images: Images, rows: Array) -> tuple[Array, Array]:
    """Contents of STATE images: ([n, ring bytes] uint8, [n, 1 + Hh] int32 cursors)."""
    window = jnp.moveaxis(images.window.at[:, rows].get(mode="clip"), 1, 0)
    return _to_bytes(window), images.cursor.at[rows].get(mode="clip")


@functools.partial(jax.jit, donate_argnums=0)
def scatter_images(images: Images, rows: Array, window: Array, cursor: Array) -> Images:
    """Overwrites STATE images (donated); arguments as `gather_images` gives them, masked rows as for pages."""
    layers, _, *rest = images.window.shape
    return Images(
        _write(images.window, (slice(None), rows), window, (layers, *rest)),
        images.cursor.at[rows].set(cursor, mode="drop"),
    )


class DevicePages:
    """The `PageMemory` of a runner.

    Attributes:
      layout: of the bytes.
    """

    def __init__(self, runner: ModelRunner, geometry: V41PoolGeometry):
        self.layout = TransferLayout.of(geometry)
        self._runner = runner

    def warm_up(self, images: bool) -> None:
        """Compiles every transfer; nothing is overwritten."""
        unit = self.layout.unit_bytes
        for count in PAGE_BUCKETS:
            gather_pages(self._runner.pools, np.zeros(count, np.int32))
            masked = np.full(count, self._runner.num_pages, np.int32)
            data = np.zeros((count, unit), np.uint8)
            self._runner.replace_pools(scatter_pages(self._runner.pools, masked, data))
        for count in IMAGE_BUCKETS if images else ():
            window, cursor = gather_images(self._runner.images, np.zeros(count, np.int32))
            masked = np.full(count, self._runner.images.cursor.shape[0], np.int32)
            arrays = np.zeros(window.shape, np.uint8), np.zeros(cursor.shape, np.int32)
            self._runner.replace_images(scatter_images(self._runner.images, masked, *arrays))

    def read_pages(self, pages: Sequence[int]) -> Callable[[], list[bytes]]:
        """Starts to read pages; see `PageMemory`."""
        parts = []
        for ids in _chunks(pages, PAGE_BUCKETS):
            parts.append((gather_pages(self._runner.pools, _padded(ids, PAGE_BUCKETS, 0)), len(ids)))
        return lambda: [row.tobytes() for data, count in parts for row in np.asarray(data)[:count]]

    def write_pages(self, contents: Mapping[int, bytes]) -> None:
        """Overwrites pages; see `PageMemory`."""
        for ids in _chunks(list(contents), PAGE_BUCKETS):
            padded = _padded(ids, PAGE_BUCKETS, self._runner.num_pages)
            data = np.zeros((len(padded), self.layout.unit_bytes), np.uint8)
            for row, page in enumerate(ids):
                data[row] = np.frombuffer(contents[page], np.uint8)
            self._runner.replace_pools(scatter_pages(self._runner.pools, padded, data))

    def read_images(self, images: Sequence[int]) -> Callable[[], list[bytes]]:
        """Starts to read STATE images by row of the image array; see `PageMemory`."""
        parts = []
        for ids in _chunks(images, IMAGE_BUCKETS):
            parts.append((*gather_images(self._runner.images, _padded(ids, IMAGE_BUCKETS, 0)), len(ids)))

        def result() -> list[bytes]:
            found = []
            for window, cursor, count in parts:
                cursors = np.asarray(cursor).astype("<i8")
                rows = zip(np.asarray(window)[:count], cursors[:count], strict=True)
                found += [ring.tobytes() + history.tobytes() for ring, history in rows]
            return found

        return result

    def write_images(self, contents: Mapping[int, bytes]) -> None:
        """Overwrites STATE images; see `PageMemory`."""
        rings = self.layout.image[0].bytes
        for ids in _chunks(list(contents), IMAGE_BUCKETS):
            padded = _padded(ids, IMAGE_BUCKETS, self._runner.images.cursor.shape[0])
            window = np.zeros((len(padded), rings), np.uint8)
            cursor = np.zeros((len(padded), self._runner.images.cursor.shape[1]), np.int32)
            for place, row in enumerate(ids):
                window[place] = np.frombuffer(contents[row], np.uint8, rings)
                cursor[place] = np.frombuffer(contents[row], "<i8", offset=rings)
            self._runner.replace_images(scatter_images(self._runner.images, padded, window, cursor))


def _chunks(ids: Sequence[int], buckets: tuple[int, ...]) -> list[Sequence[int]]:
    return [ids[start : start + buckets[-1]] for start in range(0, len(ids), buckets[-1])]


def _padded(ids: Sequence[int], buckets: tuple[int, ...], filling: int) -> np.ndarray:
    size = next(bucket for bucket in buckets if bucket >= len(ids))
    return np.asarray([*ids, *[filling] * (size - len(ids))], np.int32)
