"""The device arrays of request memory, allocated from the geometry.

`Pools` is one pytree that every step takes donated and returns: nobody else holds a reference to its arrays between
steps. Shapes and dtypes come from `V41PoolGeometry.device_arrays`; which page or slot belongs to whom is the
scheduler's knowledge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp

from scheduler.batch import DEAD
from scheduler.pool_geometry import ArraySpec, V41PoolGeometry


@flax.struct.dataclass
class Pools:
    """Pages and slots (runtime specification, "What PAGE owns" and "What STATE owns").

    Attributes:
      main: per owner [pages, PAGE / ratio, row], compressed rows: activation values (on a CPU, bfloat16 as
        uint16 bits), or uint8 FP4 rows.
      index_values: per owner [pages, PAGE / ratio, I or I / 2], index keys.
      index_scales: per owner [pages, PAGE / ratio] float32 (fp8), [pages, PAGE / ratio, I / 32] uint8 (fp4), or None.
      window: [layers, slots, ring, row], stored like `main` or as uint8 FP8 rows; position p lives at `p mod ring`.
      tail_kv: [ratio-2 owners, slots, ring_c, d] float32; position p lives at `p mod ring_c`.
      tail_score: same shape and dtype.
      cursor: [slots, 1 + Hh] int32, next position, then compressed Engram ids oldest first.
      last_token: [slots] int32, the token a deferred decode row reads.
    """

    main: tuple[jax.Array, ...]
    index_values: tuple[jax.Array, ...]
    index_scales: tuple[jax.Array | None, ...]
    window: jax.Array
    tail_kv: jax.Array
    tail_score: jax.Array
    cursor: jax.Array
    last_token: jax.Array


def allocate(geometry: V41PoolGeometry, num_pages: int, num_slots: int) -> Pools:
    """Zero-filled pools with DEAD histories."""
    return _build(geometry, num_pages, num_slots, lambda spec: jnp.zeros(spec.shape, _device_dtype(spec)))


def abstract(geometry: V41PoolGeometry, num_pages: int, num_slots: int) -> Pools:
    """The same pytree of `jax.ShapeDtypeStruct`, for compiling without memory."""
    return _build(
        geometry,
        num_pages,
        num_slots,
        lambda spec: jax.ShapeDtypeStruct(spec.shape, _device_dtype(spec)),  # type: ignore[no-untyped-call]
        fill_cursor=False,
    )


def _device_dtype(spec: ArraySpec) -> Any:
    """The declared dtype; on a CPU rows of bfloat16 are stored as uint16 bits, see `pallas_kernels.stored_rows`."""
    rows = spec.name == "window" or spec.name.startswith("main")
    if rows and spec.dtype == "bfloat16" and jax.default_backend() == "cpu":
        return jnp.uint16
    return spec.dtype


def poison(pools: Pools) -> Pools:
    """Every byte replaced by NaN (or the code of one), cursors by an impossible position.

    For tests: a forward that reads memory nobody wrote then shows it.
    """

    def spoil(array: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jnp.floating):
            return jnp.full_like(array, jnp.nan)
        if array.dtype == jnp.uint16:
            return jnp.full_like(array, 0x7FC0)  # the bits of a bfloat16 NaN
        # 0x7F: NaN as E4M3, a scale of one as E8M0, a huge int32 when read as four bytes.
        return jnp.full_like(array, 0x7F if array.dtype == jnp.uint8 else 0x7F7F7F7F)

    return cast(Pools, jax.tree.map(spoil, pools))


def _build(
    geometry: V41PoolGeometry,
    num_pages: int,
    num_slots: int,
    make: Callable[[ArraySpec], Any],
    fill_cursor: bool = True,
) -> Pools:
    arrays = {spec.name: make(spec) for spec in geometry.device_arrays(num_pages, num_slots)}
    owners = range(len(geometry.owners))
    cursor = arrays["cursor"]
    return Pools(
        main=tuple(arrays[f"main[{index}]"] for index in owners),
        index_values=tuple(arrays[f"index_values[{index}]"] for index in owners),
        index_scales=tuple(arrays.get(f"index_scales[{index}]") for index in owners),
        window=arrays["window"],
        tail_kv=arrays["tail_kv"],
        tail_score=arrays["tail_score"],
        cursor=cursor.at[:, 1:].set(DEAD) if fill_cursor else cursor,
        last_token=arrays["last_token"],
    )
