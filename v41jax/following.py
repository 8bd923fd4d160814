"""A follower of a service of several processes: the same checkpoint and options as process 0, and a runner that does
what process 0's does."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.engram_tables import EngramTables
from checkpoints.load import Checkpoint
from scheduler.model_view import ModelView
from scheduler.runtime_config import EngineConfig, validate_runtime_config
from v41jax.config import ModelConfig
from v41jax.engram_lookup import EngramLookup
from v41jax.mesh_draft_runner import MeshDraftRunner, load_draft_on_mesh
from v41jax.mesh_runner import MeshRunner, load_on_mesh
from v41jax.model import ModelSetup
from v41jax.multihost import follow, hosts_of, join
from v41jax.parameters import WeightForm
from v41jax.precision import Precision
from v41jax.sharding import arrangement, check_mesh, make_mesh
from v41jax.token_map import load_token_map


def own_draft(config: EngineConfig, directory: Path) -> EngineConfig:
    """The options, without a `speculative_model` that names the checkpoint itself."""
    named = config.speculative_model
    if named is not None and Path(named).resolve() == directory.resolve():
        return dataclasses.replace(config, speculative_model=None)
    return config


def follow_checkpoint(directory: Path, config: EngineConfig) -> None:
    """Follows process 0 on one checkpoint until it stops.

    Args:
      directory: the checkpoint, as process 0 has it.
      config: options of process 0, with this process's `process_id`.

    Raises:
      ValueError: options that cannot be served.
    """
    hosts = hosts_of(config)
    if hosts is None:
        raise ValueError("only a service of several processes has followers: give --coordinator HOST:PORT")
    config = own_draft(config, directory)
    root = json.loads((directory / "config.json").read_text())
    model_config = ModelConfig.from_dict(root)
    view = ModelView.from_config(model_config, root)
    validate_runtime_config(config, view)
    parallel = arrangement(config.mesh, config.enable_expert_parallel, config.expert_exchange)
    drafts = config.num_speculative_tokens > 0
    check_mesh(model_config, parallel, drafts=drafts)
    join(hosts)
    mesh = make_mesh(parallel)
    precision = Precision(jnp.dtype(config.dtype), config.activation_quantization)
    form: WeightForm = "dequantized" if jax.default_backend() == "cpu" else "stored"
    setup = ModelSetup(model_config, config.geometry(view), precision, config.kernels, parallel)
    stored: dict[str, Any] = {"form": form, "dtype": precision.activation_dtype}
    with contextlib.ExitStack() as held:
        checkpoint = held.enter_context(Checkpoint.open(directory, scopes=("text", "draft") if drafts else ("text",)))
        lookup = None
        if model_config.text.engram_layer_ids:
            tables = EngramTables.open(checkpoint)
            held.callback(tables.close)
            lookup = EngramLookup(model_config, load_token_map(directory, model_config), tables)
        params = load_on_mesh(checkpoint, mesh, parallel, max_model_len=config.model_len(view), **stored)
        make_runner: Callable[..., MeshRunner] = functools.partial(MeshRunner, params, setup, mesh=mesh)
        if drafts:
            draft = load_draft_on_mesh(checkpoint, mesh, parallel, **stored)
            make_runner = functools.partial(MeshDraftRunner, params, setup, draft_parameters=draft, mesh=mesh)
        follow(hosts, lambda options: make_runner(**options), lookup)
