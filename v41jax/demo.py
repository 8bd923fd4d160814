"""`make demo`: the trained miniature from its files to text, and its logits against the float64 reference."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import checkpoints
from checkpoints.load import Checkpoint
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax.engine import Engine
from v41jax.full_forward import full_forward, load_model
from v41jax.precision import Precision
from v41jax.reference import ReferenceModel
from v41jax.tokenizer import Tokenizer

MODEL = Path(checkpoints.__file__).parent / "nano"
PROMPT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
    "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
    "truth is so well fixed in the minds of the surrounding families, that he is considered"
)
COMPARED_TOKENS = 64
LOGIT_TOLERANCE = 1e-3
"""Largest difference the demo accepts between float32 on this machine and the float64 reference."""


def main() -> None:
    """Runs the demo and exits with 1 when the logits do not agree."""
    console = Console()
    describe(MODEL, console)
    generate(MODEL, console)
    difference = compare(MODEL, console)
    raise SystemExit(0 if difference <= LOGIT_TOLERANCE else 1)


def describe(directory: Path, console: Console) -> None:
    """Opens the checkpoint strictly and says what it is."""
    began = time.perf_counter()
    with Checkpoint.open(directory, scopes=("text", "draft", "vision")) as checkpoint:
        text = checkpoint.config.text
        modes = ", ".join(f"{layer.index} {layer.mode.value}" for layer in checkpoint.config.layers)
        seconds = time.perf_counter() - began
        table = _table()
        table.add_row("checkpoint", f"{directory.name}: {len(checkpoint.names)} tensors opened in {seconds:.1f} s")
        table.add_row(
            "model", f"hidden {text.hidden_size}, {text.n_routed_experts} experts, vocabulary {text.vocab_size}"
        )
        table.add_row("layers", modes)
        console.print(table)


def generate(directory: Path, console: Console) -> None:
    """Serves a prompt twice: the first run compiles, the second is timed and hits the first one's pages."""
    config = EngineConfig(
        max_num_seqs=4, max_model_len=512, max_num_batched_tokens=256, decode_buckets=(1, 4), kv_cache_block_size=64
    )
    with Engine.from_checkpoint(directory, config, warm_up=False) as engine:
        prompt = engine.prompt(PROMPT, SamplingParams(max_tokens=64, temperature=0.7, seed=5, ignore_eos=True))
        first = engine.generate([prompt])[0]
        again = engine.generate([prompt])[0]
        # Other ids of the same length: nothing to reuse, nothing to compile.
        fresh = dataclasses.replace(prompt, tokens=prompt.tokens[::-1])
        timed = engine.generate([fresh])[0]
        summary = engine.summary()
        decode = (len(again.tokens) - 1) / (again.time_s - again.time_to_first_token_s)
        table = _table()
        table.add_row("prompt", f"{first.prompt_tokens} tokens")
        table.add_row("text", f"...{PROMPT[-40:]}[bold]{escape(first.text)}")
        table.add_row("prefill", f"{len(fresh.tokens) / timed.time_to_first_token_s:,.0f} tokens/s")
        table.add_row("decode", f"{decode:,.0f} tokens/s at batch 1")
        table.add_row("prefix reuse", f"{again.cached_tokens} of {again.prompt_tokens} prompt tokens on the second run")
        table.add_row("weights", f"{summary['weight_bytes'] / 1e6:.1f} MB")
        table.add_row(
            "pools", f"{summary['pool_bytes'] / 1e6:.1f} MB: {summary['pages']} pages, {summary['slots']} slots"
        )
        table.add_row("compiled", f"{summary['programs']} programs in {summary['compile_seconds']:.1f} s")
        console.print(table)


def compare(directory: Path, console: Console) -> float:
    """Largest difference between the logits of the prompt's last position here and in the float64 reference.

    float32 activations and no activation quantization on both sides: what is left is the order of sums.
    """
    tokens = np.asarray(Tokenizer.from_directory(directory).encode(PROMPT)[:COMPARED_TOKENS], np.int32)
    precision = Precision(activation_dtype=jnp.float32, activation_quantization=False)
    with load_model(directory, precision, max_model_len=COMPARED_TOKENS) as model:
        logits = full_forward(model.params, tokens, model.setup, model.lookup)[-1]
    with (
        Checkpoint.open(directory) as checkpoint,
        ReferenceModel(checkpoint, activation_quantization=False) as reference,
    ):
        expected = reference.forward(tokens, record=False).logits[-1]
    difference = float(np.abs(logits - expected).max())
    same = "same" if int(logits.argmax()) == int(expected.argmax()) else "another"
    table = _table()
    table.add_row(
        "reference",
        f"last of {len(tokens)} positions: logits differ by at most {difference:.1e} of a spread of "
        f"{expected.std():.2f}, {same} best token",
    )
    console.print(table)
    return difference


def _table() -> Table:
    table = Table(show_header=False, box=None)
    table.add_column(width=12)
    return table


if __name__ == "__main__":
    main()
