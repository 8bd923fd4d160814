"""The worked prompts of the chat protocol, section "Worked prompts", and the tools section they share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

_DATA = json.loads(Path(__file__).with_name("worked_prompts.json").read_text(encoding="utf-8"))

TOOLS_SECTION: str = _DATA["tools_section"]


class WorkedPrompt(NamedTuple):
    """One entry; `messages` are as published except P13's flattened images, which are parts again."""

    name: str
    note: str
    arguments: dict[str, Any]
    characters: int
    sha256: str
    messages: list[dict[str, Any]]
    prompt: str


def digest(text: str) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the UTF-8 bytes, as the protocol prints them."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


WORKED_PROMPTS = {entry["name"]: WorkedPrompt(**entry) for entry in _DATA["prompts"]}
WEATHER: dict[str, Any] = WORKED_PROMPTS["P9"].messages[0]["tools"][0]
