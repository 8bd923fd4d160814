"""Cases of the products over stored weights: FP8 linear layers at few rows, FP4 experts at few rows and in prefill."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_cases import Case
from pallas_kernels import backend
from pallas_kernels.arithmetic import fake_q8
from pallas_kernels.block_scaled_linear import block_scaled_linear
from pallas_kernels.block_scaled_linear import triton as linear_triton
from pallas_kernels.grouped_experts import ExpertWeights, grouped_experts
from pallas_kernels.grouped_experts import triton as experts_triton
from pallas_kernels.grouped_experts.arrangement import arranged
from pallas_kernels.grouped_experts.triton_many import ManyConfig

LAYERS = {
    "wq_b": (32_768, 1280),
    "wo_b": (5120, 8192),
    "shared_w1": (2304, 5120),
    "wq_a": (1280, 5120),
    "wkv": (512, 5120),
}
"""Outputs and inputs of the model's FP8 layers."""

WIDTH, HIDDEN, CHOSEN, SWIGLU_LIMIT = 5120, 2304, 6, 10.0


def _activations(seed: int, rows: int, width: int) -> jax.Array:
    return fake_q8(jax.random.normal(jax.random.key(seed), (rows, width), jnp.bfloat16))


def _relative(expected: jax.Array, found: jax.Array) -> float:
    expected, found = expected.astype(jnp.float32), found.astype(jnp.float32)
    return float(jnp.linalg.norm(expected - found) / jnp.linalg.norm(expected))


def _linear_sets(rows: int, outputs: int, inputs: int, count: int) -> list[tuple]:
    sets = []
    for index in range(count):
        one, two = jax.random.split(jax.random.key(index))
        codes = jax.random.randint(one, (outputs, inputs), 0, 256, jnp.uint8)
        codes = jnp.where((codes & 127) == 127, codes ^ 1, codes)
        scales = jax.random.randint(two, (outputs // 32, inputs // 32), 112, 120, jnp.uint8)
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        sets.append((_activations(index, rows, inputs), codes, scales))
    return sets


def _linear_case(name: str, rows: int, outputs: int, inputs: int, configs: list[tuple[int, ...]]) -> Case:
    return Case(
        "block_scaled_linear",
        f"{name} {rows} rows, {inputs} -> {outputs}",
        outputs * inputs + outputs * inputs // 1024 + 2 * rows * (inputs + outputs),
        2 * rows * outputs * inputs,
        functools.partial(_linear_sets, rows, outputs, inputs),
        {kind: functools.partial(block_scaled_linear, implementation=kind) for kind in ("xla", "pallas")},
        _relative,
        4e-3,
        {
            "config " + " ".join(map(str, config)): functools.partial(
                linear_triton.block_scaled_linear, config=linear_triton.Config(*config)
            )
            for config in configs
            if config[2] * config[3] <= inputs and inputs % (config[2] * config[3]) == 0
        },
    )


Matrices = tuple[ExpertWeights, ...]
"""Gate, up and down."""


@functools.cache
def _expert_matrices(experts: int, width: int, hidden: int) -> tuple[Matrices, Matrices]:
    """The same matrices as the checkpoint stores them and as `auto` reads them, which is arranged on a GPU."""
    matrices = []
    for index, (outputs, inputs) in enumerate(((hidden, width), (hidden, width), (width, hidden))):
        one, two = jax.random.split(jax.random.key(index))
        packed = jax.random.randint(one, (experts, outputs, inputs // 2), 0, 256, jnp.uint8)
        scales = jax.random.randint(two, (experts, outputs, inputs // 32), 118, 122, jnp.uint8)
        matrices.append(ExpertWeights(packed, scales))
    stored = tuple(matrices)
    if backend.current_target().route != "triton":
        return stored, stored
    arrange = jax.jit(arranged)
    return stored, tuple(weight._replace(packed=arrange(weight.packed)) for weight in stored)


def _routing(seed: int, rows: int, experts: int, chosen: int) -> np.ndarray:
    return np.argsort(np.random.default_rng(seed).random((rows, experts)), axis=1)[:, :chosen].astype(np.int32)


def _expert_sets(rows: int, experts: int, width: int, hidden: int, chosen: int, count: int) -> list[tuple]:
    stored, loaded = _expert_matrices(experts, width, hidden)
    return [
        (
            _activations(index, rows, width),
            jnp.asarray(_routing(index, rows, experts, chosen)),
            jax.random.uniform(jax.random.key(index), (rows, chosen)),
            stored,
            loaded,
            jnp.ones((rows,), bool),
        )
        for index in range(count)
    ]


def _expert_case(rows: int, experts: int, width: int, hidden: int, chosen: int, configs: list[tuple[int, ...]]) -> Case:
    distinct = np.mean([len(np.unique(_routing(seed, rows, experts, chosen))) for seed in range(4)])
    options = {"swiglu_limit": SWIGLU_LIMIT, "quantize_hidden": True}

    def definition(x, ids, weights, stored, loaded, valid):
        return grouped_experts(x, ids, weights, *stored, valid=valid, implementation="xla", **options)

    def kernel(x, ids, weights, stored, loaded, valid):
        return grouped_experts(x, ids, weights, *loaded, valid=valid, implementation="pallas", **options)

    def kernel_of_stored(x, ids, weights, stored, loaded, valid):
        return grouped_experts(x, ids, weights, *stored, valid=valid, implementation="pallas", **options)

    def tuned(x, ids, weights, stored, loaded, valid, config):
        return experts_triton.grouped_experts(x, ids, weights, *loaded, valid=valid, config=config, **options)

    def config(rows: int, *tiles: int) -> experts_triton.Config | ManyConfig:
        if len(tiles) == 5:
            return ManyConfig(rows, *tiles)
        return experts_triton.Config(rows, experts_triton.Tile(*tiles[:4]), experts_triton.Tile(*tiles[4:]))

    variants = {"xla": definition, "pallas": kernel}
    if backend.current_target().route == "triton":
        variants["pallas, stored order"] = kernel_of_stored
    return Case(
        "grouped_experts",
        f"{rows} rows, top {chosen} of {experts}",
        int(distinct * 3 * width * hidden * 17 / 32) + rows * width * 6,
        6 * rows * chosen * width * hidden,
        functools.partial(_expert_sets, rows, experts, width, hidden, chosen),
        variants,
        _relative,
        2e-2,
        {"config " + " ".join(map(str, entry)): functools.partial(tuned, config=config(*entry)) for entry in configs},
    )


def cases(size: str) -> Iterator[Case]:
    """Few rows and 1,024 at the model's FP8 layers; experts at 1, 8, 64 and 4,096 rows of the 96 a quarter holds."""
    if size == "smoke":
        yield _linear_case("small", 3, 96, 128, [(64, 16, 64, 2, 4, 1)])
        yield _expert_case(4, 8, 128, 128, 2, [(16, 32, 16, 4, 1, 64, 16, 4, 1)])
        return
    # outputs, rows, inner, splits, warps, stages
    few = [(32, 16, 256, 1, 4, 3), (64, 16, 256, 1, 4, 3), (64, 16, 128, 4, 4, 4), (128, 16, 128, 2, 8, 4)]
    many = [(64, 64, 128, 1, 4, 4), (128, 64, 128, 2, 8, 3), (128, 64, 128, 4, 4, 3), (64, 64, 64, 4, 4, 5)]
    for name, (outputs, inputs) in LAYERS.items():
        for rows in (1, 8, 64):
            tuning = (many if rows == 64 else few) if name in ("wq_b", "wo_b", "wq_a") and rows != 8 else []
            yield _linear_case(name, rows, outputs, inputs, tuning)
    for name in ("wq_b", "wo_b", "shared_w1"):
        yield _linear_case(name, 1024, *LAYERS[name], [])
    # Rows of a block; outputs, words a step, warps, stages of the first product; of the second.
    few = [
        (16, 64, 64, 4, 3, 64, 64, 4, 3),
        (16, 64, 64, 4, 2, 128, 64, 4, 3),
        (16, 64, 64, 2, 3, 32, 64, 2, 3),
        (16, 32, 64, 2, 4, 64, 64, 2, 4),
        (16, 32, 128, 2, 2, 32, 32, 2, 4),
        (16, 32, 64, 1, 3, 32, 64, 1, 3),
    ]
    # Rows of a block and of its smallest product, outputs, words a step, warps, stages.
    prefill = [(128, 32, 128, 16, 4, 4), (128, 32, 128, 32, 4, 2), (128, 32, 256, 32, 8, 4), (64, 32, 128, 32, 4, 3)]
    for rows, tuning in ((1, few), (8, few), (64, few), (4096, prefill)):
        yield _expert_case(rows, 96, WIDTH, HIDDEN, CHOSEN, tuning)
