"""Where a measurement comes from: what every benchmark prints beside its numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import jax
import jaxlib


def commit_hash() -> str:
    """The checkout's commit, marked when files differ from it; "unknown" where there is no repository."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def provenance() -> dict[str, Any]:
    """Device, versions and commit, as plain values."""
    device = jax.devices()[0]
    name = f"{platform.machine()} CPU, {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
    return {
        "device": name,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "commit": commit_hash(),
    }
