"""A follower of a service of several processes: the same checkpoint and options as process 0, and a runner that does
what process 0's does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.engram_tables import EngramTables
from checkpoints.load import Checkpoint
from scheduler.runtime_config import EngineConfig
from v41jax.engram_lookup import EngramLookup
from v41jax.host_options import hosts_of, shared_of
from v41jax.mesh_draft_runner import MeshDraftRunner, load_draft_on_mesh
from v41jax.mesh_runner import MeshRunner, load_on_mesh
from v41jax.model import ModelSetup
from v41jax.multihost import Model, follow_at
from v41jax.parameters import WeightForm
from v41jax.precision import Precision
from v41jax.serving_options import Serving, begin_serving
from v41jax.sharding import make_mesh
from v41jax.token_map import load_token_map


def follow_checkpoint(directory: Path, config: EngineConfig) -> None:
    """Follows process 0 on one checkpoint until it stops.

    Args:
      directory: the checkpoint, as process 0 has it.
      config: options of process 0, with this process's `process_id`.

    Raises:
      ConfigError: the checkpoint's config.json is invalid.
      RuntimeConfigError: options that cannot be served.
      HostsError: this process and process 0 do not agree.
    """
    serving = begin_serving(directory, config)
    hosts = hosts_of(serving.config)
    if hosts is None:
        raise ValueError("only a service of several processes has followers: give --coordinator HOST:PORT, or auto")
    with contextlib.ExitStack() as held:
        shared = shared_of(serving.config, directory)
        follow_at(hosts, shared, functools.partial(_load, directory, serving, held))


def _load(directory: Path, serving: Serving, held: contextlib.ExitStack) -> Model:
    """What process 0's steps are repeated with; `held` receives the open files."""
    config, model, view, parallel = serving
    mesh = make_mesh(parallel)
    precision = Precision(jnp.dtype(config.dtype), config.activation_quantization)
    form: WeightForm = "dequantized" if jax.default_backend() == "cpu" else "stored"
    setup = ModelSetup(model, config.geometry(view), precision, config.kernels, parallel)
    stored: dict[str, Any] = {"form": form, "dtype": precision.activation_dtype}
    scopes = ("text", "draft") if serving.drafts else ("text",)
    checkpoint = held.enter_context(Checkpoint.open(directory, scopes=scopes))
    lookup = None
    if model.text.engram_layer_ids:
        tables = EngramTables.open(checkpoint)
        held.callback(tables.close)
        lookup = EngramLookup(model, load_token_map(directory, model), tables)
    params = load_on_mesh(checkpoint, mesh, parallel, max_model_len=config.model_len(view), **stored)
    make_runner: Callable[..., MeshRunner] = functools.partial(MeshRunner, params, setup, mesh=mesh)
    if serving.drafts:
        draft = load_draft_on_mesh(checkpoint, mesh, parallel, **stored)
        make_runner = functools.partial(MeshDraftRunner, params, setup, draft_parameters=draft, mesh=mesh)
    return Model(lambda options: make_runner(**options), lookup)
