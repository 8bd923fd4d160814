"""How the processes of a service find each other: JAX's devices, and where process 0 listens for the others."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from v41jax.host_channel import user_secret
from v41jax.host_options import SECRET_VARIABLE, Hosts, HostsError

_ANNOUNCEMENT_BYTES = 2048


def describe(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:2000] if text else type(error).__name__


def join(hosts: Hosts) -> None:
    """Joins the devices of the processes that the options name; before anything else of JAX is used."""
    _prepare_jax()
    # Detection would leave a process of a cluster one of its devices; here a process has all of its machine's.
    jax.distributed.initialize(hosts.coordinator, hosts.processes, hosts.process, cluster_detection_method="deactivate")


def join_cluster() -> tuple[int, int]:
    """Joins the devices of the processes that the cluster's environment names (TPU pods, SLURM, Open MPI, ...).

    Returns:
      How many processes there are, and which this one is.

    Raises:
      HostsError: there is no such environment, or JAX was used already.
    """
    if not jax.distributed.is_initialized():
        _prepare_jax()
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError, LookupError, OSError) as error:
            raise HostsError(
                [
                    f"coordinator 'auto' found no processes to join ({describe(error)}): start them by "
                    "SLURM, Open MPI, or on Cloud TPU, or give --coordinator HOST:PORT --num-processes N --process-id I"
                ]
            ) from error
    return jax.process_count(), jax.process_index()


def _prepare_jax() -> None:
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM


class Meeting(NamedTuple):
    """Where the others find process 0.

    Attributes:
      places: addresses, the likeliest first; whoever else listens there is told from it by the secret.
      secret: of the service.
    """

    places: tuple[tuple[str, int], ...]
    secret: bytes


def meeting_of(hosts: Hosts) -> Meeting:
    """The meeting that the options name.

    Raises:
      HostsError: no secret was given, and this user can keep none.
    """
    secret = hosts.secret
    if secret is None:
        try:
            secret = user_secret()
        except (OSError, RuntimeError) as error:
            raise HostsError([f"no secret of this user ({error}): set {SECRET_VARIABLE} on all processes"]) from error
    return Meeting((hosts.address,), secret)


def listen(hosts: Hosts) -> socket.socket:
    """Process 0's listening socket, on any free port if the cluster's environment names the processes."""
    if hosts.automatic:
        return socket.create_server(("", 0))
    host, port = hosts.address
    if hosts.local:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    # As JAX's coordinator: a name may stand for an address that only the others use.
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def announce(hosts: Hosts, listener: socket.socket | None) -> Meeting:
    """Tells all processes of a cluster, through JAX, where process 0 listens and a secret drawn for this service.

    Args:
      hosts: of this process.
      listener: of process 0; None elsewhere.
    """
    text = b""
    if listener is not None:
        port = listener.getsockname()[1]
        told = {"places": [(host, port) for host in _own_addresses()], "secret": secrets.token_hex(32)}
        text = json.dumps(told).encode()
    sent = np.zeros(_ANNOUNCEMENT_BYTES, np.uint8)
    sent[: len(text)] = np.frombuffer(text, np.uint8)
    heard = np.asarray(multihost_utils.broadcast_one_to_all(sent, is_source=listener is not None))
    told = json.loads(heard.astype(np.uint8).tobytes().rstrip(b"\0"))
    places = tuple((str(host), int(port)) for host, port in told["places"])
    return Meeting(places, (hosts.secret or b"") + bytes.fromhex(told["secret"]))


def _own_addresses() -> list[str]:
    """IPv4 addresses under which this machine may be reached, those of its own use last."""
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.254.254.254", 9))  # sends nothing: the system chooses the address it would send from
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return list(dict.fromkeys([*(one for one in found if not one.startswith("127.")), "127.0.0.1"]))[:16]
