"""The engine on several meshes of one host: are the tokens one device's, and how fast are they?

    python -m benchmarks.meshes --preset v4.1-flash --layers-of tiny --experts 16 --meshes 1x1,1x2,2x1

A mesh is DATA x MODEL; experts are whole, over `data` and `model`. The checkpoint is synthesized, every layer at full
width with `--experts` of the routed experts and small Engram tables, unless `--model DIR` names one; `--layers-of`
takes the number of layers and what each of them is from another preset. Every mesh answers the same prompts greedily
and all at once, first in float32 without activation quantization, where tokens are compared with the first mesh's,
then as released, where rates are taken after a run that compiles. Prints one JSON line a measurement. On a CPU give it
virtual devices: `XLA_FLAGS=--xla_force_host_platform_device_count=8`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.provenance import provenance
from checkpoints.synthesize import synthesize
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax.config import ModelConfig
from v41jax.engine import Engine
from v41jax.engine_requests import Prompt
from v41jax.engram_primes import set_engram_rows
from v41jax.presets import preset_dict

ENGRAM_VOCABULARY = 2000
PAGE = 64


LAYERS = (
    "num_hidden_layers",
    "compress_ratios",
    "kv_source_layer_ids",
    "index_source_layer_ids",
    "candidate_source_layer_id",
    "engram_layer_ids",
    "dspark_target_layer_ids",
)
"""Keys that say how many layers there are and what each of them is."""


def reduced(name: str, experts: int | None, layers_of: str | None = None) -> ModelConfig:
    """A preset with fewer routed experts and small Engram tables, maybe with the layers of another."""
    root = preset_dict(name)
    text = root["text_config"]
    if layers_of is not None:
        other = preset_dict(layers_of)["text_config"]
        text |= {key: other[key] for key in LAYERS}
    if experts is not None:
        text["n_routed_experts"] = experts
        text["engram_vocab_size"] = min(text["engram_vocab_size"], ENGRAM_VOCABULARY)
    set_engram_rows(text)
    return ModelConfig.from_dict(root)


def options_of(mesh: tuple[int, int], arguments: argparse.Namespace, exact: bool) -> EngineConfig:
    """Options of one mesh; `exact` rounds nothing beyond float32."""
    data, model = mesh
    length = arguments.prompt_tokens + arguments.new_tokens + 1
    pages = -(-length // PAGE)
    batch = arguments.batch
    return EngineConfig(
        dtype="float32" if exact else "bfloat16",
        activation_quantization=not exact,
        kernels="xla" if exact else "auto",
        encoder_swa_bounded_replay=False,
        decoder_swa_bounded_replay=False,
        kv_cache_block_size=PAGE,
        max_num_batched_tokens=batch * arguments.prompt_tokens,
        max_num_seqs=batch,
        max_model_len=pages * PAGE,
        num_pages=batch * pages,
        decode_buckets=(-(-batch // data),),
        enable_prefix_caching=False,
        mesh={"data": data, "model": model},
        enable_expert_parallel=data * model > 1,
        vision="off",
    )


def measured(
    directory: Path, mesh: tuple[int, int], arguments: argparse.Namespace, exact: bool
) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Replies of a mesh, and its rates where it is not `exact`."""
    began = time.perf_counter()
    with Engine.from_checkpoint(directory, options_of(mesh, arguments, exact), warm_up=False) as engine:
        loaded = time.perf_counter() - began
        vocabulary = engine.core.runner.setup.config.text.vocab_size
        shape = (arguments.batch, arguments.prompt_tokens)
        ids = np.random.default_rng(arguments.seed).integers(3, vocabulary - 10, shape)
        sampling = SamplingParams(max_tokens=arguments.new_tokens, ignore_eos=True)
        prompts = [Prompt(tuple(row), sampling) for row in ids.tolist()]
        began = time.perf_counter()
        replies = [result.tokens for result in engine.generate(prompts)]
        record = {"load_s": round(loaded, 1), "first_run_s": round(time.perf_counter() - began, 1)}
        if not exact:
            results = engine.generate(prompts)
            first = max(result.time_to_first_token_s for result in results)
            last = max(result.time_s for result in results)
            record |= {
                "prefill_tokens_per_s": round(ids.size / first, 1),
                "decode_step_ms": round(1e3 * (last - first) / (arguments.new_tokens - 1), 2),
                "decode_tokens_per_s": round(arguments.batch * (arguments.new_tokens - 1) / (last - first), 1),
            }
        return replies, record


def measurements(directory: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All of them: tokens of every mesh, then rates of every mesh."""
    for exact in (True, False)[arguments.released_only :]:
        expected = None
        for mesh in arguments.meshes:
            replies, record = measured(directory, mesh, arguments, exact)
            expected = replies if expected is None else expected
            yield {
                "mesh": "data={},model={}".format(*mesh),
                "dtype": "float32, nothing quantized" if exact else "bfloat16, as released",
                "batch": arguments.batch,
                "prompt_tokens": arguments.prompt_tokens,
                "new_tokens": arguments.new_tokens,
                "equal_replies": sum(ours == theirs for ours, theirs in zip(replies, expected, strict=True)),
                **record,
            }
            jax.clear_caches()


def mesh_of(text: str) -> tuple[int, int]:
    """`DATAxMODEL` -> sizes."""
    data, model = text.split("x")
    return int(data), int(model)


def main(given: Sequence[str] | None = None) -> None:
    """Measures and prints; exits with 1 where float32 tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="v4.1-flash")
    parser.add_argument("--layers-of", help="a preset whose layers to take")
    parser.add_argument("--experts", type=int, help="routed experts of every layer, instead of the preset's")
    parser.add_argument("--model", type=Path, help="a checkpoint directory, instead of a preset")
    parser.add_argument(
        "--meshes", type=lambda text: [mesh_of(part) for part in text.split(",")], default=[(1, 1), (1, 2), (2, 1)]
    )
    parser.add_argument("--released-only", action="store_true", help="rates alone, without the comparison in float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(given)
    header, same = provenance(), True
    with contextlib.ExitStack() as stack:
        directory = arguments.model
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "checkpoint"
            began = time.perf_counter()
            synthesize(directory, reduced(arguments.preset, arguments.experts, arguments.layers_of), scopes=("text",))
            print(json.dumps({"synthesize_s": round(time.perf_counter() - began, 1)}), flush=True)
        for record in measurements(directory, arguments):
            same = same and (record["dtype"].startswith("bfloat16") or record["equal_replies"] == arguments.batch)
            print(json.dumps({**record, **header}), flush=True)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
