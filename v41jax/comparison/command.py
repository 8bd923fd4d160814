"""What `v41jax compare` does once its arguments are parsed."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from checkpoints.load import Checkpoint
from v41jax.commands.compare import tokens_of
from v41jax.commands.generate import read_prompts
from v41jax.comparison import budgets as budget_files
from v41jax.comparison.html import page
from v41jax.comparison.options import Options, parse
from v41jax.comparison.recording import write
from v41jax.comparison.report import as_json, print_report
from v41jax.comparison.run import MODES, Result, compare
from v41jax.comparison.subjects import RecordedSubject, open_subject
from v41jax.config import ModelConfig
from v41jax.precision import Precision
from v41jax.prompt_logits import check_ids


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of a comparison; see the command's help.

    Attributes:
      model: checkpoint directory.
      left, right: sides, as text.
      precision: where the sides say nothing.
      mode: "forced" or "free".
      layers: layer by layer as well.
      until: the first so many layers only; None is all.
      tokens, prompts, lengths, seed: where the prompts come from, in this order of precedence.
      continuation: see `JaxSubject`.
      json, html, budgets, export: files.
    """

    model: Path
    left: str
    right: str
    precision: Precision
    mode: str
    layers: bool
    until: int | None
    tokens: Path | None
    prompts: Path | None
    lengths: Sequence[int]
    seed: int
    continuation: int
    json: Path | None
    html: Path | None
    budgets: Path | None
    export: Path | None


def run(request: Request) -> bool:
    """Compares, reports, and says whether everything is within its budget.

    Raises:
      ValueError: arguments that cannot be compared.
    """
    limits = None if request.budgets is None else budget_files.read_budgets(request.budgets)
    if request.mode not in MODES:
        raise ValueError(f"--mode {request.mode} must be one of {', '.join(MODES)}")
    left, right = (_parse(text, request.precision) for text in (request.left, request.right))
    layers = request.layers and not left.logits_only and not right.logits_only
    if request.export is not None and (not layers or request.until is not None):
        raise ValueError(
            "--export writes hidden states of every layer: it needs --layers, no --until, no bounded replay and no mesh"
        )
    with Checkpoint.open(request.model, scopes=("text",)) as checkpoint:
        config = checkpoint.config
    if request.until is not None and not 1 <= request.until <= len(config.layers):
        raise ValueError(f"--until {request.until} must be 1..{len(config.layers)}, the layers of the model")
    prompts = _prompts(request, config)
    # A recording brings its own prompt.
    longest = max([len(ids) for ids in prompts or ()], default=0)
    recorded = [open_subject(request.model, side, longest, 0) for side in (left, right) if side.kind == "npz"]
    if recorded:
        subject = recorded[0]
        assert isinstance(subject, RecordedSubject)
        prompts, longest = [subject.ids], len(subject.ids)
    sides = [open_subject(request.model, side, longest, request.continuation) for side in (left, right)]
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    try:
        with bar:
            task = bar.add_task("comparing", total=len(prompts))
            result = compare(
                *sides,
                prompts,
                mode=request.mode,
                layers=layers,
                until=request.until,
                progress=lambda: bar.advance(task),
            )
    finally:
        for side in sides:
            side.close()
    lines = [] if limits is None else past_budgets(limits, result)
    print_report(result, Console(), lines)
    _write_files(request, result, lines)
    return not lines


def past_budgets(limits: budget_files.Budgets, result: Result) -> list[str]:
    """One line a measurement past its budget, of all prompts."""
    lines = budget_files.past(limits, result.end, None)
    for number, bisection in enumerate(result.layers):
        found = budget_files.past(limits, None, bisection)
        lines += [f"prompt {number}: {line}" if len(result.layers) > 1 else line for line in found]
    return lines


def _write_files(request: Request, result: Result, lines: list[str]) -> None:
    if request.json is not None:
        request.json.write_text(json.dumps(as_json(result, lines), indent=1) + "\n", encoding="utf-8")
    if request.html is not None:
        request.html.write_text(page(result, lines), encoding="utf-8")
    if request.export is not None and result.recording is not None:
        precision = result.right.precision
        mode = "quant" if precision.activation_quantization else "noquant"
        write(request.export, result.recording, f"{mode}.{jnp.dtype(precision.activation_dtype).name}")


def _parse(text: str, precision: Precision) -> Options:
    try:
        return parse(text, precision)
    except ValueError as error:
        raise ValueError(f"{error}; see `v41jax compare --help`") from None


def _prompts(request: Request, config: ModelConfig) -> list[NDArray[np.int32]]:
    text = config.text
    if request.tokens is not None:
        ids = np.load(request.tokens, allow_pickle=False)
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise ValueError(f"--tokens {request.tokens}: expected one integer array [n] with n >= 1")
        given = [ids]
    elif request.prompts is not None:
        given = [np.asarray(tokens_of(line, request.model)) for line in read_prompts(request.prompts)]
    else:
        random = np.random.default_rng(request.seed)
        given = [random.integers(0, text.vocab_size, size) for size in request.lengths]
        given = [np.where(ids == config.image_token_id, 0, ids) for ids in given]
    return [check_ids(ids, text.vocab_size) for ids in given]
