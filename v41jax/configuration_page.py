"""`docs/configuration.md` from the code: engine options, commands, checkpoint configuration, presets.

    python -m v41jax.configuration_page --out docs/configuration.md

A test compares the file with what this module writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from scheduler.runtime_config import EngineConfig
from v41jax.cli import app
from v41jax.commands.engine_options import NOT_FLAGS
from v41jax.config import TextConfig, VisionConfig
from v41jax.presets import PRESETS, preset_dict

_HEAD = """# Configuration

Written by `python -m v41jax.configuration_page --out docs/configuration.md` from the code; a test
fails when it is stale.
"""

_PANEL = "Engine options"


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser(description="Writes the configuration reference.")
    parser.add_argument("--out", type=Path, required=True)
    parser.parse_args().out.write_text(page(), encoding="utf-8")


def page() -> str:
    """The whole page."""
    parts = [_HEAD, *engine_options(), *commands(), *checkpoint_configuration()]
    return "\n".join(parts).rstrip() + "\n"


def engine_options() -> Iterator[str]:
    """A table of `EngineConfig`."""
    described = attributes_of(EngineConfig)
    yield "## Engine options\n"
    yield "Fields of `scheduler.runtime_config.EngineConfig`; flags of `v41jax generate` and `v41jax serve`.\n"
    yield "| field | flag | default | meaning |\n|---|---|---|---|"
    for field in dataclasses.fields(EngineConfig):
        default = "" if field.default is dataclasses.MISSING else _shown(field.default)
        yield f"| `{field.name}` | {_flag(field)} | {default} | {_cell(described.get(field.name, ''))} |"
    yield ""


def commands() -> Iterator[str]:
    """A table of every command's own options."""
    yield "## Commands\n"
    root = typer.main.get_command(app)
    for path, command in _leaves(root, "v41jax"):
        yield f"### `{path}`\n"
        yield inspect.cleandoc(command.help or "").split("\f")[0].strip() + "\n"
        rows = []
        for parameter in command.params:
            if parameter.name == "help" or getattr(parameter, "rich_help_panel", None) == _PANEL:
                continue
            names = [*parameter.opts, *parameter.secondary_opts]
            name = " ".join(f"`{option}`" for option in names)
            if parameter.param_type_name == "argument":
                name = f"`{parameter.name.upper()}`"
            required = "required" if parameter.required else _shown(parameter.default)
            rows.append(f"| {name} | {required} | {_cell(getattr(parameter, 'help', None) or '')} |")
        if rows:
            yield "| option | default | meaning |\n|---|---|---|"
            yield from rows
            yield ""
        if any(getattr(parameter, "rich_help_panel", None) == _PANEL for parameter in command.params):
            yield "Also every engine option.\n"


def checkpoint_configuration() -> Iterator[str]:
    """Keys of `config.json` with their values in every preset."""
    yield "## `config.json`\n"
    yield "Keys of `text_config` and `vision_config`, and their values in the presets that `--preset` takes.\n"
    roots = {name: preset_dict(name) for name in PRESETS}
    for section, kind in (("text_config", TextConfig), ("vision_config", VisionConfig)):
        yield f"### `{section}`\n"
        yield "| key | " + " | ".join(f"`{name}`" for name in roots) + " |"
        yield "|---" * (len(roots) + 1) + "|"
        for field in dataclasses.fields(kind):
            values = [_shown(root.get(section, {}).get(field.name, "-")) for root in roots.values()]
            yield f"| `{field.name}` | " + " | ".join(values) + " |"
        yield ""


def attributes_of(kind: type) -> dict[str, str]:
    """Name -> text of the `Attributes:` section of a docstring; an entry may name several, on several lines."""
    lines = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:")[2].splitlines()
    entries: list[str] = []
    for line in lines:
        if re.match(r"  \S", line):
            entries.append(line.strip())
        elif line.strip() and entries:
            entries[-1] += " " + line.strip()
    described = {}
    for entry in entries:
        names, separator, text = entry.partition(":")
        if separator:
            described |= {name.strip(): text.strip() for name in names.split(",")}
    return described


def _leaves(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None or any(parameter.name != "help" for parameter in command.params):
        yield path, command
    if children is None:
        return
    for name in sorted(children):
        yield from _leaves(children[name], f"{path} {name}")


def _flag(field: dataclasses.Field[Any]) -> str:
    name = field.name.replace("_", "-")
    if field.name == "activation_quantization":
        return "`--no-activation-quantization`"
    if isinstance(field.default, bool) and field.name not in NOT_FLAGS:
        return f"`--[no-]{name}`"
    return f"`--{name}`"


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        value = value.value
    if value is None or value == "" or callable(value):
        return ""
    text = str(value)
    return f"`{text}`" if len(text) <= 60 else f"`{text[:57]}...`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    main()
