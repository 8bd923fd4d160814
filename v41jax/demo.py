"""`make demo`: a tiny checkpoint from nothing to tokens, and its logits against the float64 reference.

The weights are random, so the text is noise; every number on the way to it is the real thing.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from checkpoints.load import Checkpoint
from checkpoints.synthesize import packaged_tokenizer, synthesize
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax.engine import Engine
from v41jax.full_forward import full_forward, load_model
from v41jax.precision import Precision
from v41jax.presets import preset
from v41jax.reference import ReferenceModel
from v41jax.tokenizer import Tokenizer

PROMPT = (
    "A page holds the compressed memory of one hundred and twenty-eight tokens. A slot holds what a request cannot "
    "rebuild from its pages: the last rows of every layer's window, the half of a pair that waits for its partner, and "
    "the last three words it has seen. The scheduler"
)
COMPARED_TOKENS = 64
LOGIT_TOLERANCE = 1e-3
"""Largest difference the demo accepts between float32 on this machine and the float64 reference."""


def main() -> None:
    """Runs the demo and exits with 1 when the logits do not agree."""
    parser = argparse.ArgumentParser(description="The whole path on a tiny checkpoint.")
    parser.add_argument("--cache", type=Path, required=True, help="where the synthesized checkpoint is kept")
    cache: Path = parser.parse_args().cache
    console = Console()
    make_checkpoint(cache, console)
    generate(cache, console)
    difference = compare(cache, console)
    raise SystemExit(0 if difference <= LOGIT_TOLERANCE else 1)


def make_checkpoint(directory: Path, console: Console) -> None:
    """Synthesizes the checkpoint unless an earlier run left a whole one."""
    if (directory / "model.safetensors.index.json").is_file():
        console.print(f"checkpoint   {directory} (kept from an earlier run)")
    else:
        began = time.perf_counter()
        synthesize(directory, preset("tiny"), seed=7, tokenizer=packaged_tokenizer())
        console.print(f"checkpoint   {directory}, synthesized in {time.perf_counter() - began:.1f} s")
    with Checkpoint.open(directory, scopes=("text", "draft", "vision")) as checkpoint:
        text = checkpoint.config.text
        modes = ", ".join(f"{layer.index} {layer.mode.value}" for layer in checkpoint.config.layers)
        console.print(
            f"model        hidden {text.hidden_size}, {text.n_routed_experts} experts, vocabulary {text.vocab_size}"
        )
        console.print(f"layers       {modes}")


def generate(directory: Path, console: Console) -> None:
    """Serves a prompt twice: the first run compiles, the second is timed and hits the first one's pages."""
    config = EngineConfig(
        max_num_seqs=4, max_model_len=512, max_num_batched_tokens=256, decode_buckets=(1, 4), kv_cache_block_size=32
    )
    with Engine.from_checkpoint(directory, config, warm_up=False) as engine:
        prompt = engine.prompt(PROMPT, SamplingParams(max_tokens=32, ignore_eos=True))
        first = engine.generate([prompt])[0]
        again = engine.generate([prompt])[0]
        # Other ids of the same length: nothing to reuse, nothing to compile.
        fresh = dataclasses.replace(prompt, tokens=prompt.tokens[::-1])
        timed = engine.generate([fresh])[0]
        summary = engine.summary()
        decode = (len(again.tokens) - 1) / (again.time_s - again.time_to_first_token_s)
        table = Table(show_header=False, box=None)
        table.add_row("prompt", f"{first.prompt_tokens} tokens")
        table.add_row("generated", repr(first.text))
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
    console.print(
        f"reference    last of {len(tokens)} positions: logits differ by at most {difference:.1e} of a spread of "
        f"{expected.std():.2f}, {same} best token"
    )
    return difference


if __name__ == "__main__":
    main()
