"""The blocks of few rows in one launch: a program an expert finds the pairs that chose it and cuts them into blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.grouped_experts.blocks import MOST_COMPARED, Blocks

Array = jax.Array

COMPARED = 2**15
"""The most pairs times experts that every program compares, where it must know which experts are chosen."""


def pays(pairs: int, experts: int) -> bool:
    """Whether the kernel orders these pairs: few enough for one program to see."""
    seen = pairs >= experts or pl.next_power_of_2(pairs) * pl.next_power_of_2(experts) <= COMPARED
    return pairs <= MOST_COMPARED and seen


def blocks_of_layer(
    expert_ids: Array, valid: Array, layer: Array | int, experts: int, total: int, rows: int, *, interpret: bool = False
) -> Blocks:
    """As `blocks.blocks_of`, where a block that holds nothing can lie between two that do.

    Expert e starts at block `start // rows + chosen`, where `start` pairs chose the experts before it and `chosen` of
    those were chosen at all: ceil(count / rows) blocks never reach the next one's. With as many pairs as experts or
    more, e itself takes the place of `chosen`, which nobody has to count then.

    Args:
      expert_ids: [N, k] int32, of this layer; ids outside 0 .. experts - 1 are not served.
      valid: [N] bool.
      layer: whose experts they are.
      experts: of a layer.
      total: experts of all layers, the id of a block that holds nothing.
      rows: of a block.
      interpret: run as plain JAX operations.

    Returns:
      Blocks whose `pair` holds nothing of use past the pairs that are served.
    """
    chosen = expert_ids.shape[1]
    pairs = expert_ids.size
    most = min(experts, pairs) + pairs // rows
    counted = pairs < experts
    triton = backend.triton()

    def kernel(ids_ref, valid_ref, layer_ref, expert_ref, first_ref, end_ref, pair_ref):
        expert = pl.program_id(0)
        pair = jnp.arange(pl.next_power_of_2(pairs), dtype=jnp.int32)
        near = jnp.minimum(pair, pairs - 1)
        ids = triton.load(ids_ref.at[near])
        served = (pair < pairs) & triton.load(valid_ref.at[near // chosen]) & (ids >= 0) & (ids < experts)
        ids = jnp.where(served, ids, experts)

        member = ids == expert
        start = jnp.sum((ids < expert).astype(jnp.int32))
        count = jnp.sum(member.astype(jnp.int32))
        # Places that are not stored lie past the end: interpret mode writes their old value there.
        place = start + jnp.cumsum(member.astype(jnp.int32)) - 1
        triton.store(pair_ref.at[jnp.where(member, place, pairs)], pair, mask=member)

        if counted:
            name = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
            taken = jnp.max((ids[None, :] == name[:, None]).astype(jnp.int32), axis=1)
            slots = jnp.sum(jnp.where(name < expert, taken, 0))
            own_slot = (count > 0).astype(jnp.int32)
        else:
            slots, own_slot = expert, 1
        begin, until = start // rows + slots, (start + count) // rows + slots + own_slot
        until = jnp.where(expert == experts - 1, most, until)
        block = jnp.arange(pl.next_power_of_2(most), dtype=jnp.int32)
        mine = (block >= begin) & (block < until)
        first = start + (block - begin) * rows
        held = first < start + count
        target = jnp.where(mine, block, most)
        name_of_block = jnp.where(held, layer_ref[0] * experts + expert, total)
        triton.store(expert_ref.at[target], name_of_block, mask=mine)
        triton.store(first_ref.at[target], first, mask=mine)
        triton.store(end_ref.at[target], jnp.broadcast_to(start + count, block.shape), mask=mine)

    integers = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in (most, most, most, pairs)]
    return Blocks(
        *backend.triton_call(
            kernel,
            integers,
            grid=(experts,),
            num_warps=4,
            num_stages=1,
            interpret=interpret,
            name="expert_blocks",
        )(expert_ids.reshape(-1), valid, backend.int_operand(layer))
    )
