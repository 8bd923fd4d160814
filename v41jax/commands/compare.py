"""`v41jax compare`: how far one way of computing the model is from another."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from v41jax.commands.generate import read_prompts
from v41jax.commands.logits import Dtype


def compare(
    model: Annotated[Path, typer.Option(help="Checkpoint directory in the released layout.")],
    replay: Annotated[
        bool, typer.Option("--replay", help="Distance of every bounded-replay mode to full prefill.")
    ] = False,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with prompt (text) or tokens (ids).")] = None,
    lengths: Annotated[str, typer.Option(help="Without --prompts: lengths of random prompts.")] = "200,333,512",
    continuation: Annotated[int, typer.Option(help="Last tokens of each prompt that are fed as decode steps.")] = 16,
    dtype: Annotated[Dtype, typer.Option(help="Activation dtype.")] = Dtype.BFLOAT16,
    activation_quantization: Annotated[
        bool, typer.Option(help="Fake-quantize activations as the model was trained.")
    ] = True,
    oracle: Annotated[
        bool,
        typer.Option("--oracle", help="Check every forward with the dense float64 oracle; exit 1 past its budget."),
    ] = False,
    oracle_budget: Annotated[
        float,
        typer.Option(help="Largest relative distance to the oracle; the default suits float32 without quantization."),
    ] = 1e-4,
    out: Annotated[Path | None, typer.Option(help="Write the measurements as JSON to this file.")] = None,
    seed: Annotated[int, typer.Option(help="Of random prompts.")] = 0,
) -> None:
    """Compares ways of computing the model: bounded replay with full prefill (--replay)."""
    if not replay:
        raise ValueError("nothing to compare: give --replay")
    import jax.numpy as jnp

    from checkpoints.load import Checkpoint
    from v41jax.full_forward import load_model
    from v41jax.precision import Precision
    from v41jax.prompt_logits import check_ids
    from v41jax.reference import ReferenceModel
    from v41jax.reference.replay_oracle import ReplayOracle
    from v41jax.replay_distance import measure_replay, replay_page

    with Checkpoint.open(model, scopes=("text",)) as checkpoint:
        config = checkpoint.config
    if prompts is None:
        random = np.random.default_rng(seed)
        given = [random.integers(0, config.text.vocab_size, size) for size in parse_lengths(lengths)]
        given = [np.where(ids == config.image_token_id, 0, ids) for ids in given]
    else:
        given = [tokens_of(request, model) for request in read_prompts(prompts)]
    ids = [check_ids(np.asarray(prompt), config.text.vocab_size) for prompt in given]
    precision = Precision(jnp.dtype(dtype.value), activation_quantization)
    longest = max(len(prompt) for prompt in ids)
    with contextlib.ExitStack() as opened:
        loaded = opened.enter_context(
            load_model(model, precision, max_model_len=longest, block_size=replay_page(config))
        )
        exact = None
        if oracle:
            weights = opened.enter_context(Checkpoint.open(model, scopes=("text",)))
            reference = ReferenceModel(weights, activation_quantization=activation_quantization)
            exact = ReplayOracle(opened.enter_context(reference))
        bar = opened.enter_context(
            Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        )
        task = bar.add_task("measuring", total=len(ids))
        distances = measure_replay(
            loaded, ids, continuation=continuation, oracle=exact, progress=lambda: bar.advance(task)
        )
    report = {
        "model": str(model),
        "dtype": dtype.value,
        "activation_quantization": activation_quantization,
        "prompt_lengths": [len(prompt) for prompt in ids],
        "continuation": continuation,
        "modes": [dataclasses.asdict(distance) for distance in distances],
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    Console().print(_table(report["modes"]))
    past = [
        distance for distance in distances if distance.oracle_max is not None and distance.oracle_max > oracle_budget
    ]
    for distance in past:
        print(
            f"{distance.mode}: {distance.oracle_max:.2e} from the oracle, budget {oracle_budget:.2e}", file=sys.stderr
        )
    if past:
        raise typer.Exit(1)


def parse_lengths(text: str) -> list[int]:
    """`200,333` -> [200, 333].

    Raises:
      ValueError: anything but whole numbers of at least 2.
    """
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 2 for part in parts):
        raise ValueError(f"--lengths {text!r} must be whole numbers of at least 2, separated by commas")
    return [int(part) for part in parts]


def tokens_of(request: dict[str, Any], model: Path) -> list[int]:
    """Ids of one line of a prompts file; images are not measured."""
    if request.get("images"):
        raise ValueError("a prompt has images: compare --replay measures prompts of text")
    if "tokens" in request:
        return list(request["tokens"])
    from v41jax.tokenizer import Tokenizer

    return Tokenizer.from_directory(model).encode(request["prompt"])


def _table(modes: list[dict[str, Any]]) -> Table:
    table = Table(title="distance to full prefill: means over rows", box=SIMPLE, pad_edge=False)
    table.add_column("mode", no_wrap=True)
    checked = any(entry["oracle_max"] is not None for entry in modes)
    for heading in ("rows", "logits", "KL", "top-1", "NLL", "change", *(("oracle",) if checked else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    for entry in modes:
        table.add_row(
            entry["mode"],
            str(entry["rows"]),
            f"{entry['logits_mean']:.2e}",
            f"{entry['kl_mean']:.2e}",
            f"{entry['top1']:.1%}",
            f"{entry['nll']:.4f}",
            f"{entry['nll'] - entry['nll_full']:+.4f}",
            *([f"{entry['oracle_max']:.1e}"] if checked else ()),
        )
    return table
