"""Trained parameters: their names and first values, what the forward reads of them, and how they are stored.

Masters are float32, keyed by the checkpoint's tensor names; the routed experts of a layer are one array
`{prefix}.ffn.experts.w1.weight` [E, F, D]. Scales have no masters: they follow from the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from checkpoints.schema import Role, TensorSpec, tensor_schema
from training.straight_through import as_bfloat16, fake_dense, fake_expert
from v41jax.config import ModelConfig

Array = jax.Array
Masters = dict[str, Array]

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123]\.weight)")
_STATES = (".gate.bias", ".gate.bias_vl")
"""Router biases: changed by the load, not by gradients."""


def stacked_name(name: str) -> tuple[str, int] | None:
    """Name of the stack an expert's weight is in, and its place; None for any other tensor."""
    found = _EXPERT.fullmatch(name)
    return (f"{found[1]}.{found[3]}", int(found[2])) if found else None


def is_state(name: str) -> bool:
    """Whether a master is changed by the router's load only."""
    return name.endswith(_STATES)


def master_shapes(config: ModelConfig, scopes: Iterable[str]) -> dict[str, tuple[TensorSpec, tuple[int, ...]]]:
    """Spec of one stored tensor and the master's shape, by master name."""
    shapes: dict[str, tuple[TensorSpec, tuple[int, ...]]] = {}
    for name, spec in tensor_schema(config, scopes).items():
        if spec.role.is_scale:
            continue
        shape = spec.shape
        if spec.role is Role.EXPERT_WEIGHT:
            shape = (*shape[:-1], 2 * shape[-1])
        stack = stacked_name(name)
        if stack is None:
            shapes[name] = (spec, shape)
        else:
            shapes[stack[0]] = (spec, (stack[1] + 1, *shape))
    return shapes


def initial_masters(config: ModelConfig, scopes: Iterable[str], seed: int) -> Masters:
    """First values: projections at `1 / sqrt(inputs)`, outputs smaller, streams distinct and nearly unmixed."""
    random = np.random.default_rng(seed)
    streams = config.text.hc_mult
    depth = config.text.num_hidden_layers
    masters = {}
    for name, (spec, shape) in master_shapes(config, scopes).items():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if "norm" in leaf or leaf in ("q_weight", "k_weight"):
            value = np.ones(shape)
        elif leaf.endswith("_scale"):
            value = np.full(shape, 0.3)
        elif leaf.endswith("_base"):
            value = np.zeros(shape)
            value[:streams] = -np.log(max(streams - 1, 1))
            value[streams : 2 * streams] = random.normal(0, 0.7, streams)
            value[2 * streams :] = (4 * np.eye(streams)).ravel()
        elif leaf in ("attn_sink", "bias", "bias_vl") or name.endswith("confidence_head.proj.weight"):
            value = np.zeros(shape)
        elif spec.role is Role.TABLE_WEIGHT:
            value = random.normal(0, 0.1, shape)
        elif name == "embed.weight":
            value = random.normal(0, 0.3, shape)
        else:
            gain = 1.0
            if leaf in ("wo_b", "w2"):
                gain = depth**-0.5
            elif name in ("head.weight",) or name.endswith("markov_head.head.weight"):
                gain = 0.2
            value = random.normal(0, gain / np.sqrt(shape[-1]), shape)
        masters[name] = jnp.asarray(value, jnp.float32)
    return masters


def serving_weights(masters: Masters, config: ModelConfig, scopes: Iterable[str], dtype: DTypeLike) -> Masters:
    """What the forward reads of some scopes: values of the stored formats, matrices in the activation dtype.

    Engram tables are left alone: their rows are rounded where they are gathered.
    """
    shapes = master_shapes(config, scopes)
    masters = {name: masters[name] for name in shapes}
    result = {}
    for name, master in masters.items():
        role, stored = shapes[name][0].role, shapes[name][0].dtype
        if role is Role.DENSE_WEIGHT:
            result[name] = fake_dense(master).astype(dtype)
        elif role is Role.EXPERT_WEIGHT:
            result[name] = fake_expert(master).astype(dtype)
        elif role is Role.PLAIN and stored == "BF16":
            result[name] = as_bfloat16(master)
            if not name.endswith("embed.weight"):  # whose gradient is a sum over rows, better kept in float32
                result[name] = result[name].astype(dtype)
        else:
            result[name] = master
    return result
