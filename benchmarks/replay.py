"""What bounded replay saves: `python -m benchmarks.replay [--lengths 512,1024,...] [--preset bench-small]`.

Prints JSON lines. `arithmetic`: FLOPs of a prefill with and without replay for the released shape, from its
configuration alone. `chunk`: one compiled forward of a chunk that ends no prompt, of one that does, and of all rows
through all layers. `first_token`: an engine's time to the first token, cold and after a prefix hit, with both switches
off and on. Beside wall times stand the CPU seconds of the process, which do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from checkpoints.synthesize import synthesize
from scheduler.buckets import Buckets
from scheduler.pools import allocate
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax.config import LayerMode, ModelConfig
from v41jax.engine import Engine
from v41jax.engine_requests import Prompt
from v41jax.engram_hashing import history_before
from v41jax.full_forward import compressed_of, engram_rows_of, load_model, step
from v41jax.precision import Precision
from v41jax.presets import preset
from v41jax.replay_distance import replay_page
from v41jax.spans import Span, batch_of

CHUNK = 1024
"""Rows of a full chunk."""


def publication_flops(config: ModelConfig, layer: int) -> float:
    """FLOPs of one row of a FULL layer's compression: latents and index keys."""
    text, topology = config.text, config.layers[layer]
    projections = 1 if topology.ratio == 1 else 2
    return 2 * (projections * text.hidden_size * text.head_dim + text.head_dim * text.index_head_dim / topology.ratio)


def window_key_flops(config: ModelConfig) -> float:
    """FLOPs of one row's window key."""
    return 2 * config.text.hidden_size * config.text.head_dim


def layer_flops(config: ModelConfig, layer: int, context: float) -> float:
    """FLOPs of one row of a whole layer without its compression: matrix products and attention, nothing elementwise.

    Args:
      config: of the model.
      layer: layer number.
      context: positions below the row, its mean over the rows that are meant.
    """
    text, topology = config.text, config.layers[layer]
    hidden, heads, width = text.hidden_size, text.num_attention_heads, text.head_dim
    low, rank, groups = text.q_lora_rank, text.o_lora_rank, text.o_groups
    visible = context / topology.ratio if topology.ratio else 0.0
    selected = min(visible, text.index_topk)
    products = hidden * low + low * heads * width + hidden * width  # queries and window key
    products += heads * width * rank + groups * rank * hidden  # grouped output
    products += 2 * heads * width * (min(context, text.sliding_window) + selected)
    if topology.mode in (LayerMode.FULL, LayerMode.REINDEX):
        scored = visible
        if topology.mode is LayerMode.REINDEX and text.candidate_source_layer_id >= 0:
            scored = min(visible, text.candidate_topk_blocks * text.candidate_block_size)
        products += low * text.index_n_heads * text.index_head_dim + hidden * text.index_n_heads
        products += text.index_n_heads * text.index_head_dim * scored
    experts = text.num_experts_per_tok + text.n_shared_experts
    products += hidden * text.n_routed_experts + 3 * experts * hidden * text.moe_intermediate_size
    products += 2 * text.hc_mult * hidden * (2 * text.hc_mult + text.hc_mult**2)
    if topology.engram is not None:
        columns = (text.engram_max_ngram_size - 1) * text.engram_n_heads
        products += (text.hc_mult + 1) * hidden * columns * text.engram_head_dim
    return 2 * products


def prefill_flops(config: ModelConfig, length: int, *, decoder_replay: bool) -> float:
    """FLOPs of the prefill of one cold prompt and the logits of its last row.

    Every row's context is the mean one, except for rows of the tail, whose context is the whole prompt.
    """
    text = config.text
    boundary, last = config.owners[-1][0], text.num_hidden_layers - 1
    total = 2.0 * text.hidden_size * text.vocab_size
    tail = min(text.sliding_window, length)
    for layer in range(text.num_hidden_layers):
        if config.layers[layer].mode is LayerMode.FULL:
            total += length * publication_flops(config, layer)
        if not decoder_replay or layer < boundary:
            total += length * layer_flops(config, layer, length / 2)
        elif layer < last:
            total += tail * layer_flops(config, layer, length)
        else:
            total += layer_flops(config, layer, length) + (tail - 1) * window_key_flops(config)
    return total


def origin() -> dict[str, str]:
    """Where the numbers come from."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": jax.devices()[0].device_kind,
        "devices": str(jax.device_count()),
        "jax": jax.__version__,
        "commit": commit.stdout.strip() or "unknown",
    }


def arithmetic(lengths: list[int]) -> Iterator[dict[str, Any]]:
    """FLOPs of the released shape."""
    config = preset("v4.1-flash")
    for length in lengths:
        full, replayed = (prefill_flops(config, length, decoder_replay=replay) for replay in (False, True))
        yield {
            "what": "arithmetic",
            "preset": "v4.1-flash",
            "rows": length,
            "full_flops": full,
            "ratio": replayed / full,
        }


def timed(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median wall and CPU seconds of a call that has run before."""
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {"seconds": round(statistics.median(walls), 4), "cpu_seconds": round(statistics.median(cpus), 4)}


def chunks(directory: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """One forward of `CHUNK` rows in the middle of a prompt, in each variant."""
    config = preset_of(directory)
    with load_model(directory, Precision(np.float32), max_model_len=4 * CHUNK, block_size=replay_page(config)) as model:
        geometry = model.setup.geometry
        ids = np.random.default_rng(0).integers(3, config.text.vocab_size - 1000, 2 * CHUNK).astype(np.int32)
        compressed = compressed_of(model.lookup, ids, None)
        pages = range(geometry.pages_for(2 * CHUNK))
        held = [allocate(geometry, len(pages), 1)]
        base: float | None = None
        for name, final, tail in (("full", True, False), ("not final", False, True), ("final", True, True)):
            history = history_before(compressed, CHUNK, geometry.history_size)
            span = Span(CHUNK, ids[CHUNK:], compressed[CHUNK:], 0, pages, history, is_final=final)
            batch = batch_of([span], geometry, output_rows=[CHUNK - 1] if final else [], decoder_replay=tail)
            rows = engram_rows_of(model.setup, model.lookup, batch)

            def run(batch: Any = batch, rows: Any = rows) -> object:
                held[0], output = step(model.params, held[0], batch, rows, setup=model.setup, phase="prefill")
                return held[0], output

            jax.block_until_ready(run())
            times = timed(run, repeats)
            base = base or times["cpu_seconds"]
            yield {"what": "chunk", "rows": CHUNK, "variant": name, **times, "of_full": times["cpu_seconds"] / base}


def first_tokens(directory: Path, lengths: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """Time to first token of single prompts, cold and when all of their pages but the last are cached."""
    config, page = preset_of(directory), replay_page(preset_of(directory))
    random = np.random.default_rng(1)
    for replay in (False, True):
        options = EngineConfig(
            dtype="float32",
            kv_cache_block_size=page,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=1,
            max_model_len=max(lengths) + page,
            num_pages=(repeats + 2) * (max(lengths) // page + 1),
            # Images at prompt ends only: a ladder would cut the chunks of the runs without replay.
            state_checkpoint_interval_tokens=-1,
            encoder_swa_bounded_replay=replay,
            decoder_swa_bounded_replay=replay,
        )
        with Engine.from_checkpoint(directory, options, warm_up=False) as engine:
            pages = engine.core.buckets.decode_pages
            rows = tuple(sorted({2 * page, *(min(length, CHUNK) for length in lengths)}))
            engine.core.buckets = Buckets((1,), rows, (1,) * len(rows), pages, pages)
            for length in lengths:
                measured: dict[str, list[tuple[float, float, int]]] = {"cold": [], "hit": []}
                for _ in range(repeats + 1):
                    ids = tuple(random.integers(3, config.text.vocab_size - 1000, length).tolist())
                    for kind in ("cold", "hit"):
                        cpu = time.process_time()
                        [result] = engine.generate([Prompt(ids, SamplingParams(max_tokens=1, ignore_eos=True))])
                        spent = time.process_time() - cpu
                        measured[kind].append((result.time_to_first_token_s, spent, result.cached_tokens))
                for kind, samples in measured.items():
                    wall, cpu, cached = (statistics.median(column) for column in zip(*samples[1:]))
                    yield {
                        "what": "first_token",
                        "replay": replay,
                        "prompt": length,
                        "cache": kind,
                        "cached_tokens": cached,
                        "seconds": round(wall, 4),
                        "cpu_seconds": round(cpu, 4),
                    }


def preset_of(directory: Path) -> ModelConfig:
    """The configuration of a checkpoint directory."""
    return ModelConfig.from_file(directory / "config.json")


def main(arguments: list[str] | None = None) -> None:
    """Prints every measurement asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192")
    parser.add_argument("--preset", default="bench-small")
    parser.add_argument("--model", type=Path, help="a checkpoint directory instead of a random one of the preset")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default="arithmetic,chunk,first_token")
    options = parser.parse_args(arguments)
    lengths, parts = [int(part) for part in options.lengths.split(",")], options.parts.split(",")
    header = origin()
    with contextlib.ExitStack() as stack:
        directory = options.model
        if directory is None and parts != ["arithmetic"]:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            synthesize(directory, preset(options.preset), scopes=("text",))
        sources = {
            "arithmetic": lambda: arithmetic(lengths),
            "chunk": lambda: chunks(directory, options.repeats),
            "first_token": lambda: first_tokens(directory, lengths, options.repeats),
        }
        for part in parts:
            for record in sources[part]():
                print(json.dumps({**record, **header}), flush=True)


if __name__ == "__main__":
    main()
