"""What rounding, cache formats, replay and drafts do to the trained miniature's held-out text.

    python -m benchmarks.nano_numerics --model checkpoints/nano --data .data [--parts formats,replay,drafts,mlx]

`DATA` is what `python -m training.data` wrote. Prints one JSON line a measurement, then the same as Markdown tables.
Windows are a sample spread evenly over the held-out stream; every row of a table is measured on the same tokens as the
one it is compared with. `mlx` needs mlx-vlm (PyPI).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from benchmarks.provenance import provenance
from training.data import BEGIN, byte_lengths, load_stream
from v41jax.comparison.options import parse
from v41jax.comparison.replies import replies
from v41jax.comparison.subjects import open_subject
from v41jax.config import ModelConfig
from v41jax.full_forward import full_forward, load_model
from v41jax.precision import Precision
from v41jax.replay_distance import FULL, Mode, measure_replay, replay_page

REFERENCE = "reference:dtype=float32,noquant"

SIDES = {
    "float64 reference, nothing rounded": REFERENCE,
    "float32, nothing rounded": "xla:dtype=float32,noquant,chunks=256",
    "released rounding, FP8 index": "xla:dtype=bfloat16,quant,index=fp8,chunks=256",
    "released rounding, FP4 index, packed main and windows": "xla:dtype=bfloat16,quant,index=fp4,packed,chunks=256",
    "released rounding, FP4 index": "xla:dtype=bfloat16,quant,index=fp4,chunks=256",
    "released rounding, FP8 index, packed main and windows": "xla:dtype=bfloat16,quant,index=fp8,packed,chunks=256",
    "float64 reference, released rounding, FP4 index": "reference:dtype=bfloat16,quant,index=fp4",
}
"""Name in reports -> side of a comparison (`v41jax.comparison.options`)."""

REPLAYS = (
    FULL,
    Mode("decoder replay", tail=True),
    Mode("encoder replay", hit=True),
    Mode("both replays", hit=True, tail=True),
)


def sample(stream: NDArray[np.uint16], count: int, length: int) -> NDArray[np.int32]:
    """Windows spread evenly over a stream, [count, 1 + length]; the first id begins a text.

    Raises:
      ValueError: the stream is shorter than the windows together.
    """
    if stream.size < count * length:
        raise ValueError(f"{stream.size} tokens are fewer than {count} windows of {length}")
    starts = np.linspace(0, stream.size - length, count).astype(int)
    windows = np.stack([stream[start : start + length] for start in starts]).astype(np.int32)
    return np.concatenate([np.full((count, 1), BEGIN, np.int32), windows], axis=1)


def nats_of(logits: NDArray, targets: NDArray[np.int32]) -> NDArray[np.float64]:
    """Nats of every target, [rows], from logits [rows, V]."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=1, keepdims=True)
    return np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(len(targets)), targets]


def bits_per_byte(nats: float, targets: NDArray[np.int32], lengths: NDArray[np.int32]) -> float:
    """Bits a byte of text whose tokens cost `nats` together."""
    return nats / math.log(2) / int(lengths[targets].sum())


def formats(
    directory: Path, windows: NDArray[np.int32], few: int, lengths: NDArray[np.int32]
) -> Iterator[dict[str, Any]]:
    """Every side on all windows, the reference on the first `few`; differences are from the reference on those."""
    exact = best = np.empty(0)
    for name, text in SIDES.items():
        reference = text.startswith("reference")
        chosen = windows[:few] if reference else windows
        subject = open_subject(directory, parse(text, Precision()), windows.shape[1], 1)
        logits = np.stack([subject.logits(window[:-1]) for window in chosen])
        subject.close()
        nats = np.stack([nats_of(part, window[1:]) for part, window in zip(logits, chosen, strict=True)])
        if text == REFERENCE:
            exact, best = nats, logits.argmax(axis=-1)
        yield {
            "table": "formats",
            "name": name,
            "windows": len(chosen),
            "tokens": nats.size,
            "nats_a_token": float(nats.mean()),
            "bits_per_byte": bits_per_byte(float(nats.sum()), chosen[:, 1:], lengths),
            "few_windows_bits_per_byte": bits_per_byte(float(nats[:few].sum()), windows[:few, 1:], lengths),
            "nats_above_reference": float((nats[:few] - exact).mean()),
            "standard_error": float((nats[:few] - exact).std() / math.sqrt(exact.size)),
            "same_best_token": float((logits[:few].argmax(axis=-1) == best).mean()),
        }


def replays(
    directory: Path, windows: NDArray[np.int32], continuation: int, lengths: NDArray[np.int32]
) -> Iterator[dict[str, Any]]:
    """Every replay mode against full prefill, on the last tokens of every window."""
    page = replay_page(ModelConfig.from_file(directory / "config.json"))
    with load_model(directory, max_model_len=windows.shape[1], block_size=page, index_format="fp8") as model:
        distances = measure_replay(model, list(windows), continuation=continuation, modes=REPLAYS)
    targets = windows[:, -continuation:]
    for distance in distances:
        nats = distance.nll * distance.rows
        yield {
            "table": "replay",
            "name": distance.mode,
            "windows": distance.prompts,
            "tokens": distance.rows,
            "nats_a_token": distance.nll,
            "bits_per_byte": bits_per_byte(nats, targets, lengths),
            "nats_above_full": distance.nll - distance.nll_full,
            "kl_mean": distance.kl_mean,
            "same_best_token": distance.top1,
        }


def speculation(directory: Path, prompts: NDArray[np.int32], new_tokens: int) -> Iterator[dict[str, Any]]:
    """Greedy text with drafts against without: equal replies, tokens a step, acceptance by position."""
    width = ModelConfig.from_file(directory / "config.json").text.dspark_block_size
    for dtype, quantized in (("float32", False), ("bfloat16", True), ("float32", True)):
        plain, _ = replies(directory, prompts, new_tokens, dtype, quantized, 0)
        drafted, statistics = replies(directory, prompts, new_tokens, dtype, quantized, width)
        firsts = [
            next((place for place, pair in enumerate(zip(*both, strict=True)) if pair[0] != pair[1]), None)
            for both in zip(plain, drafted, strict=True)
        ]
        blocks = statistics["verified_blocks"]
        yield {
            "table": "drafts",
            "name": f"{dtype}, activations {'' if quantized else 'not '}quantized",
            "prompts": len(prompts),
            "prompt_tokens": prompts.shape[1],
            "new_tokens": new_tokens,
            "equal_replies": firsts.count(None),
            "first_differences": [place for place in firsts if place is not None],
            "tokens_a_step": statistics["tokens_per_step"],
            "verified_blocks": blocks,
            "accepted_by_position": [round(count / blocks, 4) for count in statistics["accepted_by_position"]],
        }


def mlx(directory: Path, windows: NDArray[np.int32], prefixes: int, batch: int = 10) -> Iterator[dict[str, Any]]:
    """The next token by this runtime and by mlx-vlm, float32, activations quantized and not.

    Args:
      directory: checkpoint.
      windows: [n, L].
      prefixes: of every window, evenly spaced, the whole one among them; each is one prompt.
      batch: windows that mlx-vlm takes at once.
    """
    import mlx.core as mx
    from mlx_vlm.models.deepseek_v41 import engram, language

    from benchmarks.throughput import load_mlx

    names = ("fake_quant_fp8_ue8m0", "fake_quant_fp4_ue8m0", "fake_quant_fp4_e4m3")
    other = load_mlx(directory).language_model
    last = np.arange(1, prefixes + 1) * windows.shape[1] // prefixes - 1
    for quantized in (True, False):
        if not quantized:
            for module in (engram, language):
                for name in names:
                    if hasattr(module, name):
                        setattr(module, name, lambda x, *_, **__: x)
        theirs = []
        for start in range(0, len(windows), batch):
            logits = other(mx.array(windows[start : start + batch]), cache=other.make_cache()).logits
            theirs.append(np.array(logits.astype(mx.float32))[:, last])
        with load_model(directory, Precision(jnp.float32, quantized), max_model_len=windows.shape[1]) as model:
            ours = [full_forward(model.params, window, model.setup, model.lookup)[last] for window in windows]
        left, right = np.concatenate(ours), np.concatenate([row for part in theirs for row in part])
        first, second = left.argmax(axis=1), right.argmax(axis=1)
        differ = np.nonzero(first != second)[0]
        yield {
            "table": "mlx",
            "name": "activations quantized" if quantized else "nothing rounded",
            "mlx_vlm": importlib.metadata.version("mlx-vlm"),
            "windows": len(windows),
            "prompts": len(left),
            "longest_prompt": windows.shape[1],
            "same_next_token": len(left) - len(differ),
            # By how much each side prefers its own token to the other side's.
            "our_leads_where_different": (left[differ, first[differ]] - left[differ, second[differ]]).tolist(),
            "their_leads_where_different": (right[differ, second[differ]] - right[differ, first[differ]]).tolist(),
            "largest_logit_difference": float(np.abs(left - right).max()),
            "median_logit_difference": float(np.median(np.abs(left - right).max(axis=1))),
        }


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """One table for every kind of record, in their order."""
    lines = []
    for table in dict.fromkeys(record["table"] for record in records):
        rows = [record for record in records if record["table"] == table]
        columns = [key for key in rows[0] if key not in ("table", *provenance())]
        lines += ["", "| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
        for row in rows:
            lines.append("| " + " | ".join(_cell(row[column]) for column in columns) + " |")
    return "\n".join(lines[1:])


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
    return " ".join(_cell(part) for part in value) if isinstance(value, (list, tuple)) else str(value)


def main(given: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("checkpoints/nano"))
    parser.add_argument("--data", type=Path, default=Path(".data"), help="directory with heldout.npz")
    parser.add_argument("--parts", default="formats,replay,drafts", help="of formats, replay, drafts, mlx")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--reference-windows", type=int, default=4)
    parser.add_argument("--continuation", type=int, default=64, help="last tokens of a window, measured under replay")
    parser.add_argument("--prompts", type=int, default=10, help="of the drafts")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--mlx-windows", type=int, default=20)
    parser.add_argument("--mlx-prefixes", type=int, default=10, help="of a window, each one prompt")
    options = parser.parse_args(given)
    stream = load_stream(options.data, "heldout")
    lengths = byte_lengths(Tokenizer.from_file(str(options.model / "tokenizer.json")))
    windows = sample(stream, options.windows, options.length)
    measured = {
        "formats": lambda: formats(options.model, windows, options.reference_windows, lengths),
        "replay": lambda: replays(options.model, windows, options.continuation, lengths),
        "drafts": lambda: speculation(
            options.model, sample(stream, options.prompts, options.prompt_tokens), options.new_tokens
        ),
        "mlx": lambda: mlx(options.model, sample(stream, options.mlx_windows, 255), options.mlx_prefixes),
    }
    header, records = provenance(), []
    for part in options.parts.split(","):
        for record in measured[part]():
            records.append({**record, **header})
            print(json.dumps(records[-1]), flush=True)
    print(markdown(records))


if __name__ == "__main__":
    main()
