"""Which processes serve together, from the engine's options, and what they must agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import ipaddress
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jaxlib

from scheduler.runtime_config import EngineConfig

AUTO = "auto"
"""Coordinator of a service whose processes the cluster's environment names."""
SECRET_VARIABLE = "V41JAX_HOSTS_SECRET"
"""Environment variable with what the processes prove to each other; a coordinator on another machine needs it."""
OF_PROCESS_0 = frozenset(
    {
        "coordinator",
        "process_id",
        "vision",
        "vision_cache_bytes",
        "admission_delay_factor",
        "calibration_profile",
        "host_cache_bytes",
        "disk_cache_dir",
        "disk_cache_bytes",
        "shared_cache_url",
        "shared_cache_timeout",
        "cache_fetch_timeout",
        "cache_model_id",
    }
)
"""Options that may differ: they name this process, or only process 0 uses them and what follows from them travels."""
_LISTED = 20
"""Differences that an error lists."""

Shared = Mapping[str, Any]
"""What all processes of a service must have in common, by name."""


class HostsError(ValueError):
    """Processes that cannot serve together; `faults` holds one line each."""

    def __init__(self, faults: Iterable[str]):
        self.faults = tuple(faults)
        super().__init__("; ".join(self.faults))


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Which process this is.

    Attributes:
      coordinator: `host:port` of process 0 for JAX, steps travel over the port after it; or `AUTO`.
      processes: of the service.
      process: this one, from 0.
      secret: known to all processes; others cannot connect. None takes one that this user has on this machine.
    """

    coordinator: str
    processes: int
    process: int
    secret: bytes | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Where steps are sent from."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port) + 1

    @property
    def automatic(self) -> bool:
        """The cluster's environment names the processes."""
        return self.coordinator == AUTO

    @property
    def local(self) -> bool:
        """Process 0 can only be reached from its own machine."""
        return is_loopback(self.coordinator.rpartition(":")[0])


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine, for itself alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _naming_faults(config: EngineConfig) -> list[str]:
    """What is wrong with how the options name the processes; without a fault process 0 can be told what else is."""
    faults = []
    coordinator, count, process = config.coordinator, config.num_processes, config.process_id
    if count < 1:
        faults.append(f"num_processes {count} must be at least 1")
    if process < 0 or 1 <= count <= process:
        faults.append(f"process_id {process} must lie in 0..{max(count, 1) - 1}, below num_processes")
    if coordinator is None:
        if count != 1 or process:
            given = f"num_processes {count}, process_id {process}"
            faults.append(f"{given} needs a coordinator: give --coordinator HOST:PORT, or auto")
        return faults
    if coordinator == AUTO:
        if (count != 1 or process) and not jax.distributed.is_initialized():
            given = f"num_processes {count}, process_id {process}"
            faults.append(f"coordinator 'auto' asks the cluster's environment for {given}: leave these options out")
    else:
        host, _, port = coordinator.rpartition(":")
        if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65535:
            faults.append(f"coordinator {coordinator!r} must read HOST:PORT with a port from 1 to 65534, or auto")
        elif not is_loopback(host) and not os.environ.get(SECRET_VARIABLE):
            # Whoever can connect and knows the secret could run anything; an empty one is known to everybody.
            faults.append(f"coordinator {coordinator!r} is not this machine: set {SECRET_VARIABLE} on all processes")
    return faults


def hosts_faults(config: EngineConfig) -> list[str]:
    """Everything wrong with the options of several processes, one line each."""
    faults = _naming_faults(config)
    if config.coordinator is None:
        return faults
    if math.prod(config.mesh.values()) < config.num_processes:
        faults.append(f"mesh {dict(config.mesh)} has fewer chips than num_processes {config.num_processes}")
    if config.vision == "on":
        faults.append("vision 'on' is not supported over several processes: use 'off'")
    return faults


def hosts_of(config: EngineConfig) -> Hosts | None:
    """The processes that the engine's options name; None is this one alone.

    Raises:
      HostsError: options that make no sense, all faults together.
    """
    faults = hosts_faults(config)
    if faults:
        raise HostsError(faults)
    return hosts_named(config)


def hosts_named(config: EngineConfig) -> Hosts | None:
    """As `hosts_of`, whatever else is wrong; None also where the options do not say which process this is."""
    if config.coordinator is None or _naming_faults(config):
        return None
    secret = os.environ.get(SECRET_VARIABLE)
    return Hosts(config.coordinator, config.num_processes, config.process_id, secret.encode() if secret else None)


def shared_of(config: EngineConfig, directory: Path, weights: str | None = None) -> Shared:
    """What this process has, of what all must have: options that shape a program or a pool, versions, the checkpoint.

    Args:
      config: its options.
      directory: its checkpoint; files are told apart by names and sizes, `config.json` by its content.
      weights: form of the weights; None is the platform's own.
    """
    shared = {name: value for name, value in dataclasses.asdict(config).items() if name not in OF_PROCESS_0}
    shared |= {"mesh": dict(sorted(config.mesh.items())), "weights": weights}
    shared |= {"JAX": jax.__version__, "jaxlib": jaxlib.__version__, "v41jax": _version()}
    shared["content of config.json"] = hashlib.sha256((directory / "config.json").read_bytes()).hexdigest()[:16]
    for path in sorted(directory.iterdir()):
        if path.suffix in (".safetensors", ".json") and path.is_file():
            shared[f"bytes of {path.name}"] = path.stat().st_size
    return dict(json.loads(json.dumps(shared)))  # as others will read it: a tuple is a list


def _version() -> str | None:
    try:
        return importlib.metadata.version("v41jax")
    except importlib.metadata.PackageNotFoundError:
        return None


def differences(mine: Shared, others: Mapping[int, Shared]) -> list[str]:
    """What other processes have that process 0 has not, one line for each thing and value.

    Args:
      mine: of process 0.
      others: of the others by number.
    """
    lines = []
    for name in sorted({*mine, *(name for theirs in others.values() for name in theirs)}):
        having = defaultdict(list)
        for number, theirs in sorted(others.items()):
            if theirs.get(name) != mine.get(name):
                having[repr(theirs.get(name))].append(number)
        for value, numbers in having.items():
            who = f"process {numbers[0]} has" if len(numbers) == 1 else f"processes {', '.join(map(str, numbers))} have"
            lines.append(f"{who} {name} {value}, process 0 {mine.get(name)!r}")
    if len(lines) > _LISTED:
        lines[_LISTED:] = [f"and {len(lines) - _LISTED} more differences"]
    return lines
