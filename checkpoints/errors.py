"""The one error of this package."""

from __future__ import annotations

import json
from collections.abc import Sequence


class CheckpointError(ValueError):
    """Files that are not the checkpoint they should be; `faults` holds one line each, naming file and tensor."""

    def __init__(self, faults: Sequence[str]):
        self.faults = tuple(faults)
        super().__init__("\n".join(self.faults))


def shown(value: object, limit: int = 120) -> str:
    """`value` as one printable line of at most about `limit` characters, whatever bytes a damaged file held."""
    if isinstance(value, str):
        text = json.dumps(value)[1:-1]
    else:
        try:
            text = ascii(value)
        except ValueError:  # an integer too long to print
            text = f"a huge {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
