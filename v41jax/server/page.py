"""The page at `/`: one HTML file with its style and script inside, nothing fetched from elsewhere."""

from __future__ import annotations

import functools
import json
from pathlib import Path

_FILE = Path(__file__).with_name("page.html")


@functools.cache
def _template() -> str:
    return _FILE.read_text(encoding="utf-8")


def page_html(model_name: str, *, needs_key: bool) -> str:
    """The page of one server."""
    settings = json.dumps({"model": model_name, "needsKey": needs_key}).replace("<", "\\u003c")
    return _template().replace("{SETTINGS}", settings)
