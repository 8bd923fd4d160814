"""The blocks of the GPU kernels' experts, by XLA and by the kernel, against a plain grouping of the pairs."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.grouped_experts import triton_blocks
from pallas_kernels.grouped_experts.blocks import blocks_of

LAYERS, LAYER = 4, 2


def held_rows(blocks, rows, total):
    """The pairs of every block that holds some, in the order of blocks."""
    expert, first, end, pair = (np.asarray(part) for part in (blocks.expert, blocks.first, blocks.end, blocks.pair))
    held = [index for index in range(len(expert)) if expert[index] != total]
    assert all(0 <= expert[index] < total and first[index] < end[index] for index in held)
    return [(expert[at], pair[first[at] : min(first[at] + rows, end[at])].tolist()) for at in held]


def expected_rows(ids, valid, experts, rows):
    """The pairs of each expert in their order, `rows` at a time."""
    flat, chosen = ids.reshape(-1), ids.shape[1]
    groups = []
    for expert in range(experts):
        own = [pair for pair in range(flat.size) if flat[pair] == expert and valid[pair // chosen]]
        groups += [(LAYER * experts + expert, own[at : at + rows]) for at in range(0, len(own), rows)]
    return groups


def routed(seed, count, chosen, experts):
    """Ids of which some name no expert of the layer, and rows of which some are padding."""
    random = np.random.default_rng(seed)
    ids = np.stack([np.sort(random.choice(experts + 2, chosen, replace=False)) - 1 for _ in range(count)])
    return ids.astype(np.int32), random.random(count) > 0.2


def check(ids, valid, experts, rows):
    total, wanted = LAYERS * experts, expected_rows(ids, valid, experts, rows)
    served = valid[:, None] & (ids >= 0) & (ids < experts)
    names = jnp.asarray(np.where(served, ids + LAYER * experts, total).reshape(-1))
    assert held_rows(blocks_of(names, total, rows), rows, total) == wanted
    arrays = jnp.asarray(ids), jnp.asarray(valid), LAYER
    found = triton_blocks.blocks_of_layer(*arrays, experts, total, rows, interpret=True)
    assert held_rows(found, rows, total) == wanted


@pytest.mark.parametrize(
    ("count", "chosen", "experts", "rows"),
    [(8, 6, 96, 8), (64, 6, 96, 8), (5, 3, 7, 8), (20, 2, 7, 16), (16, 6, 96, 16), (3, 5, 200, 8)],
)
def test_blocks_hold_every_served_pair_once_in_order(count, chosen, experts, rows):
    check(*routed(count, count, chosen, experts), experts, rows)


@settings(max_examples=10)
@given(st.integers(0, 99), st.integers(13, 24), st.integers(1, 3), st.integers(3, 9), st.sampled_from([8, 16]))
def test_blocks_of_any_shape(seed, count, chosen, experts, rows):
    check(*routed(seed, count, chosen, experts), experts, rows)


@pytest.mark.parametrize("name", [0, 6])
def test_one_expert_may_have_all_pairs(name):
    check(np.full((33, 1), name, np.int32), np.ones(33, bool), 7, 8)


def test_nothing_served_leaves_every_block_empty():
    check(np.full((20, 1), -1, np.int32), np.ones(20, bool), 7, 8)
    check(np.zeros((20, 1), np.int32), np.zeros(20, bool), 7, 8)


def test_where_the_kernel_orders_the_pairs():
    assert all(triton_blocks.pays(pairs, 96) for pairs in (1, 13, 48, 96, 1024))
    assert not triton_blocks.pays(1025, 96)
    assert not triton_blocks.pays(200, 384)
