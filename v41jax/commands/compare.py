"""`v41jax compare`: how far one way of computing the model is from another."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from v41jax.commands.generate import read_prompts
from v41jax.commands.logits import Dtype

if TYPE_CHECKING:
    from v41jax.precision import Precision


def compare(
    model: Annotated[Path, typer.Option(help="Checkpoint directory in the released layout.")],
    left: Annotated[str, typer.Option(help="One side; its inputs are fed to the other's layers.")] = "reference",
    right: Annotated[str, typer.Option(help="The other side.")] = "",
    replay: Annotated[
        bool, typer.Option("--replay", help="Distance of every bounded-replay mode to full prefill.")
    ] = False,
    ledger: Annotated[
        bool, typer.Option("--ledger", help="What every approximation costs, each alone, against the reference.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="With --ledger: keys of rows, joined by commas.")] = None,
    page: Annotated[
        Path | None, typer.Option("--page", help="With --ledger: write the table between the markers of this page.")
    ] = None,
    mode: Annotated[str, typer.Option(help="forced: right's layers read left's inputs. free: their own.")] = "forced",
    layers: Annotated[bool, typer.Option(help="Compare layer by layer, not only logits.")] = True,
    until: Annotated[int | None, typer.Option(help="Compare the first so many layers only, and no logits.")] = None,
    tokens: Annotated[Path | None, typer.Option(help="Token ids of one prompt, .npy int32 [n].")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with prompt (text) or tokens (ids).")] = None,
    lengths: Annotated[str, typer.Option(help="Without prompts: lengths of random ones.")] = "",
    continuation: Annotated[
        int, typer.Option(help="Under replay: last tokens of each prompt that are fed as decode steps.")
    ] = 16,
    dtype: Annotated[Dtype, typer.Option(help="Activation dtype of sides that name none.")] = Dtype.BFLOAT16,
    activation_quantization: Annotated[
        bool, typer.Option(help="Fake-quantize activations as the model was trained.")
    ] = True,
    oracle: Annotated[
        bool,
        typer.Option(
            "--oracle", help="With --replay: check every forward with the dense float64 oracle; exit 1 past its budget."
        ),
    ] = False,
    oracle_budget: Annotated[
        float,
        typer.Option(help="Largest relative distance to the oracle; the default suits float32 without quantization."),
    ] = 1e-4,
    budgets: Annotated[Path | None, typer.Option(help="Limits, .toml or .json; exit code 1 past one.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the measurements to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write a page with plots to this file.")] = None,
    export: Annotated[Path | None, typer.Option(help="Write right's tensors of the first prompt to this .npz.")] = None,
    out: Annotated[Path | None, typer.Option(help="Same as --json.")] = None,
    seed: Annotated[int, typer.Option(help="Of random prompts.")] = 0,
) -> None:
    """Compares two ways of computing the model, layer by layer and end to end.

    A side reads KIND[:OPTION,OPTION,...]. Kinds: reference (float64), xla, pallas (interpreted on a CPU),
    npz:FILE[@PREFIX] (activations recorded elsewhere). Options: dtype=float32|bfloat16, quant, noquant, packed,
    index=fp4|fp8, scores=float32|bfloat16, weights=stored|arranged|dequantized, chunks=33+7,
    replay=decoder|encoder|both, mesh=4 or mesh=4+experts (chips, whole experts on each), model=DIR (another
    checkpoint), only=main+window (what the reference quantizes: of activations, index, main, window).

    Exit code 1 when a measurement is past its budget.
    """
    import jax.numpy as jnp

    from v41jax.precision import Precision

    if not replay and not right and not ledger:
        raise ValueError("nothing to compare: give --right, --replay, or --ledger")
    precision = Precision(jnp.dtype(dtype.value), activation_quantization)
    if ledger:
        from v41jax.comparison.ledger_page import run as run_ledger

        if not run_ledger(
            model,
            _prompts(model, prompts, lengths or "320,320", seed),
            continuation=continuation,
            only=only,
            budgets=budgets,
            page=page,
            json_file=json_file or out,
        ):
            raise typer.Exit(1)
        return
    if replay:
        given = _prompts(model, prompts, lengths or "200,333,512", seed)
        _replay(model, precision, given, continuation, oracle_budget if oracle else None, json_file or out)
        return
    from v41jax.comparison.command import Request, run

    within = run(
        Request(
            model=model,
            left=left,
            right=right,
            precision=precision,
            mode=mode,
            layers=layers,
            until=until,
            tokens=tokens,
            prompts=prompts,
            lengths=parse_lengths(lengths or "96"),
            seed=seed,
            continuation=continuation,
            json=json_file or out,
            html=html_file,
            budgets=budgets,
            export=export,
        )
    )
    if not within:
        raise typer.Exit(1)


def _prompts(model: Path, prompts: Path | None, lengths: str, seed: int) -> list[NDArray[np.int32]]:
    from checkpoints.load import Checkpoint
    from v41jax.prompt_logits import check_ids

    with Checkpoint.open(model, scopes=("text",)) as checkpoint:
        config = checkpoint.config
    if prompts is None:
        random = np.random.default_rng(seed)
        given = [random.integers(0, config.text.vocab_size, size) for size in parse_lengths(lengths)]
        given = [np.where(ids == config.image_token_id, 0, ids) for ids in given]
    else:
        given = [np.asarray(tokens_of(request, model)) for request in read_prompts(prompts)]
    return [check_ids(prompt, config.text.vocab_size) for prompt in given]


def _replay(
    model: Path,
    precision: Precision,
    ids: list[NDArray[np.int32]],
    continuation: int,
    oracle_budget: float | None,
    out: Path | None,
) -> None:
    """Every replay mode against full prefill, and with a budget against the oracle."""
    import jax.numpy as jnp

    from checkpoints.load import Checkpoint
    from v41jax.full_forward import load_model
    from v41jax.reference import ReferenceModel
    from v41jax.reference.replay_oracle import ReplayOracle
    from v41jax.replay_distance import measure_replay, replay_page

    longest = max(len(prompt) for prompt in ids)
    with contextlib.ExitStack() as opened:
        weights = opened.enter_context(Checkpoint.open(model, scopes=("text",)))
        loaded = opened.enter_context(
            load_model(model, precision, max_model_len=longest, block_size=replay_page(weights.config))
        )
        exact = None
        if oracle_budget is not None:
            reference = ReferenceModel(weights, activation_quantization=precision.activation_quantization)
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
        "dtype": jnp.dtype(precision.activation_dtype).name,
        "activation_quantization": precision.activation_quantization,
        "prompt_lengths": [len(prompt) for prompt in ids],
        "continuation": continuation,
        "modes": [dataclasses.asdict(distance) for distance in distances],
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    Console().print(_table(report["modes"]))
    if oracle_budget is None:
        return
    past = [item for item in distances if item.oracle_max is not None and item.oracle_max > oracle_budget]
    for item in past:
        print(f"{item.mode}: {item.oracle_max:.2e} from the oracle, budget {oracle_budget:.2e}", file=sys.stderr)
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
        raise ValueError("a prompt has images: compare takes prompts of text")
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
