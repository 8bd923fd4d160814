"""Random weights and pool contents made on the device: a model of any size without a checkpoint.

The distributions are those of `checkpoints.synthesize`, so that activations neither die nor explode; only the bytes
are drawn by JAX, one array at a time. What a step costs does not depend on them beyond which experts and entries are
chosen.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scheduler.pool_geometry import V41PoolGeometry
from scheduler.pools import Pools, abstract
from v41jax.config import ModelConfig
from v41jax.draft_parameters import DraftParameters, draft_leaves
from v41jax.parameters import Parameters, WeightForm, describe_schema, parameter_leaves

Array = jax.Array

SCALE_ONE = 127
"""The E8M0 code of 1."""
E4M3_HALF = 0x30
"""E4M3 code of one half."""
E4M3_DEVIATION, E2M1_DEVIATION = 1.0, 2.9
"""Root mean square of the codes drawn."""
NORMS = ("attn_norm", "ffn_norm", "norm", "q_norm", "kv_norm", "k_norm", "q_weight", "k_weight")
GAINS = {"head": 2.0, "router.weight": 1.5}


def random_parameters(
    config: ModelConfig, *, max_model_len: int, seed: int = 0, form: WeightForm = "stored"
) -> Parameters:
    """Weights as an accelerator holds them.

    Args:
      config: of the model.
      max_model_len: positions that the RoPE tables cover.
      seed: of all of them.
      form: "stored" or "arranged", whose random codes are as good in any order.
    """
    describe = describe_schema(config, "text")
    leaves = parameter_leaves(config, describe, max_model_len=max_model_len, form=form, dtype=jnp.bfloat16)
    return _drawn(leaves, config, seed)


def random_draft(config: ModelConfig, seed: int = 0, form: WeightForm = "stored") -> DraftParameters:
    """Weights of the draft, as `random_parameters` makes them; its proposals are as good as random ones."""
    return _drawn(draft_leaves(config, describe_schema(config, "draft"), form=form, dtype=jnp.bfloat16), config, seed)


def _drawn(leaves: Any, config: ModelConfig, seed: int) -> Any:
    """Arrays for a tree of leaves; RoPE tables are what they are."""
    keys = iter(jax.random.split(jax.random.key(seed), len(jax.tree.leaves(leaves))))

    def make(path: Any, leaf: Any) -> Array:
        key, name = next(keys), ".".join(part.name for part in path if hasattr(part, "name"))
        if name.startswith(("plain.", "yarn.")):
            return jax.device_put(leaf.read(None))
        return _weight(key, name, leaf.held.shape, jnp.dtype(leaf.held.dtype), config.text.hc_mult)

    return jax.tree_util.tree_map_with_path(make, leaves)


def random_pools(geometry: V41PoolGeometry, num_pages: int, num_slots: int, seed: int = 1) -> Pools:
    """Pools as a long run leaves them: every row in use, no code a NaN, cursors at 0."""
    arrays, structure = jax.tree.flatten(abstract(geometry, num_pages, num_slots))
    keys = jax.random.split(jax.random.key(seed), len(arrays))
    pools = jax.tree.unflatten(structure, [_rows(key, array.shape, array.dtype) for key, array in zip(keys, arrays)])
    width = geometry.head_dim
    # Values of about one: random scales would make infinities of them.
    if geometry.main_format == "fp4":
        pools = pools.replace(main=tuple(_with_scales(rows, width // 2, E4M3_HALF) for rows in pools.main))
    if geometry.window_format == "fp8":
        pools = pools.replace(window=_with_scales(pools.window, width, SCALE_ONE - 6))
    if geometry.index_plane_format == "fp4":
        pools = pools.replace(index_scales=tuple(_with_scales(rows, 0, SCALE_ONE - 1) for rows in pools.index_scales))
    return pools


@functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=0)
def _with_scales(rows: Array, first: int, code: int) -> Array:
    """Rows whose bytes from `first` on are `code`."""
    return rows.at[..., first:].set(jnp.uint8(code))


def _weight(key: Array, name: str, shape: tuple[int, ...], dtype: Any, streams: int) -> Array:
    last = name.rsplit(".", 1)[-1]
    deviation = next((gain for suffix, gain in GAINS.items() if name.endswith(suffix)), 1.0) / math.sqrt(shape[-1])
    if last == "scales":
        packed = ".experts." in name
        inputs = 32 * shape[-1]
        step = 1 / math.sqrt(inputs) / (E2M1_DEVIATION if packed else E4M3_DEVIATION)
        return jnp.full(shape, SCALE_ONE + round(math.log2(step)), dtype)
    if dtype in (jnp.uint8, jnp.uint16):
        return _bits(key, shape, dtype)
    if dtype == jnp.float8_e4m3fn:
        return _normal(key, shape, dtype, E4M3_DEVIATION)
    if last in NORMS:
        return jnp.ones(shape, dtype)
    if last == "base":
        return _mix_base(shape, streams)
    if last == "scale":
        return jnp.full(shape, 0.5, dtype)
    if last in ("bias", "bias_vl", "sink"):
        return jnp.zeros(shape, dtype)
    deviation = 1.0 if last == "embed" else deviation
    return _normal(key, shape, dtype, deviation)


def _mix_base(shape: tuple[int, ...], streams: int) -> Array:
    """Streams mostly keep to themselves: the diagonal of the mixing matrix stands out."""
    base = np.zeros(shape, np.float32)
    base[..., 2 * streams :: streams + 1] = 4.0
    return jnp.asarray(base)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _bits(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Uniform bits of an unsigned `dtype`."""
    return _in_blocks(lambda k, s: jax.random.bits(k, s, dtype), key, shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key: Array, shape: tuple[int, ...], dtype: Any, deviation: float) -> Array:
    """Normal values rounded to `dtype`."""
    return _in_blocks(lambda k, s: (deviation * jax.random.normal(k, s)).astype(dtype), key, shape)


def _in_blocks(draw: Callable[..., Array], key: Array, shape: tuple[int, ...]) -> Array:
    """Draws along the leading axis in turn, whose float32 noise would not fit at once for a large stack."""
    if math.prod(shape) <= 1 << 28 or len(shape) < 2:
        return draw(key, shape)
    return jax.lax.map(lambda k: draw(k, shape[1:]), jax.random.split(key, shape[0]))


def _rows(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    if dtype == jnp.int32:
        return jnp.zeros(shape, dtype)
    if dtype == jnp.uint8:
        # 0x00 .. 0x77 and their negatives are finite as E4M3 and any pair of E2M1 codes.
        return _finite_bytes(key, shape)
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(_normal(key, shape, jnp.bfloat16, 1.0), jnp.uint16)
    return _normal(key, shape, dtype, 1.0)


@functools.partial(jax.jit, static_argnums=1)
def _finite_bytes(key: Array, shape: tuple[int, ...]) -> Array:
    return _bits(key, shape, jnp.uint8) & jnp.uint8(0xF7)
