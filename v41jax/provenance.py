"""Where a measurement comes from: what every benchmark prints beside its numbers."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import jaxlib

_CHECKOUT = Path(__file__).resolve().parent.parent


def commit_hash() -> str:
    """The commit of the checkout that this code runs from, marked when files differ; "unknown" outside of one."""
    if not (_CHECKOUT / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(_CHECKOUT), "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
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
