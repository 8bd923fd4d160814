"""What an engine is asked to serve: its options and its checkpoint's `config.json`, checked together before anything
is read, compiled or joined. Process 0 of several, its followers and an engine alone all begin here.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import NamedTuple

from scheduler.model_view import ModelView
from scheduler.runtime_config import EngineConfig, RuntimeConfigError, validate_runtime_config
from v41jax.config import ConfigError, ModelConfig
from v41jax.host_joining import describe, join_cluster
from v41jax.host_options import AUTO, hosts_faults, hosts_named
from v41jax.layers.collectives import Parallel
from v41jax.multihost import refuse
from v41jax.sharding import arrangement, mesh_faults


class Serving(NamedTuple):
    """What will be served.

    Attributes:
      config: the options, without a `speculative_model` that names the checkpoint itself.
      model: of the checkpoint.
      view: what the scheduler knows of it.
      parallel: the mesh and how experts lie on it.
    """

    config: EngineConfig
    model: ModelConfig
    view: ModelView
    parallel: Parallel

    @property
    def drafts(self) -> bool:
        """Tokens are drafted."""
        return self.config.num_speculative_tokens > 0


def _own_draft(config: EngineConfig, directory: Path) -> EngineConfig:
    named = config.speculative_model
    if named is not None and Path(named).resolve() == directory.resolve():
        return dataclasses.replace(config, speculative_model=None)
    return config


def serving_faults(config: EngineConfig, model: ModelConfig, view: ModelView) -> list[str]:
    """Every option that cannot be served, whatever it is of: the runtime, the mesh, the processes; each fault once."""
    parallel = arrangement(config.mesh, config.enable_expert_parallel, config.expert_exchange)
    faults = hosts_faults(config)
    try:
        validate_runtime_config(config, view)
    except RuntimeConfigError as error:
        faults += error.faults
    faults += mesh_faults(model, parallel, drafts=config.num_speculative_tokens > 0)
    return list(dict.fromkeys(faults))


def check_serving(directory: Path, config: EngineConfig) -> Serving:
    """Reads the model's configuration and refuses what cannot be served.

    Args:
      directory: a checkpoint in the released layout.
      config: the options.

    Raises:
      ConfigError: the checkpoint's config.json is invalid.
      RuntimeConfigError: with every fault of `serving_faults`.
    """
    config = _own_draft(config, directory)
    try:
        model = ModelConfig.from_file(directory)
    except ConfigError as error:
        raise ConfigError([f"{directory / 'config.json'}: {fault}" for fault in error.faults]) from None
    view = ModelView.from_config(model, json.loads((directory / "config.json").read_bytes()))
    faults = serving_faults(config, model, view)
    if faults:
        raise RuntimeConfigError(faults)
    parallel = arrangement(config.mesh, config.enable_expert_parallel, config.expert_exchange)
    return Serving(config, model, view, parallel)


def begin_serving(directory: Path, config: EngineConfig) -> Serving:
    """As `check_serving`, with the numbers of `in_cluster`; other processes of the service hear of a refusal."""
    config = in_cluster(directory, config)
    try:
        return check_serving(directory, config)
    except (ValueError, OSError) as error:
        hosts = hosts_named(config)
        if hosts is not None and not hosts.automatic:
            refuse(hosts, getattr(error, "faults", None) or [describe(error)])
        raise


def in_cluster(directory: Path, config: EngineConfig) -> EngineConfig:
    """The options with the number of this process and of all, which a cluster's environment may have to say.

    Such a cluster is joined: a process that refused its options afterwards would leave the others waiting, so they are
    checked before.

    Args:
      directory: a checkpoint in the released layout.
      config: the options.

    Raises:
      HostsError: there is no cluster.
      ValueError: as `check_serving`.
    """
    if config.coordinator != AUTO or config.num_processes != 1 or config.process_id:
        return config
    check_serving(directory, config)
    processes, process = join_cluster()
    return dataclasses.replace(config, num_processes=processes, process_id=process)
