"""Tokens per second with drafts off, of fixed and of dynamic width: `python -m benchmarks.speculation [--preset pico]`.

The target is a random checkpoint, or `--model DIR`. Its draft is used as it is (`stored`), and with Markov tables
planted so that it follows the target's own greedy bigrams at a chosen rate: `good`, `half`, and `bad`, which always
errs. The step costs and the confidences' temperatures of dynamic width are measured here for every draft; `--widths
fixed` leaves that out.

First every draft is run in float32 without activation quantization, where greedy tokens are asserted to be those
without drafts. Rates are measured in the released precision, where a value at a rounding boundary may be rounded the
other way in a step of another shape: there the tokens before the first difference are counted. Prints one JSON line a
measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.provenance import provenance
from checkpoints.synthesize import synthesize
from scheduler.buckets import Buckets
from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax.calibration import measure_profile
from v41jax.confidence_profile import running_identity
from v41jax.config import ModelConfig
from v41jax.draft_parameters import DraftParameters
from v41jax.engine import Engine
from v41jax.engine_requests import Prompt
from v41jax.presets import preset
from v41jax.replay_distance import replay_page

STRENGTH = 16.0
"""Times two, the least logit by which a planted successor leads."""

QUALITIES = {"stored": None, "good": 0.95, "half": 0.5, "bad": 0.0}
"""Share of the target's bigrams that the draft knows; None leaves the draft as it is."""


def planted(draft: DraftParameters, successors: Mapping[int, int]) -> DraftParameters:
    """The draft with Markov tables that make it propose given successors.

    Every successor has a code of +-1, its row of W2 times `STRENGTH`; a token's row of W1 is the code of its successor.
    """
    shape = draft.markov_embed.shape
    embed, head = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    codes = np.random.default_rng(0).choice((-1.0, 1.0), shape)
    for token, successor in successors.items():
        embed[token] = codes[successor]
        head[successor] = STRENGTH * codes[successor]
    return draft._replace(
        markov_embed=jnp.asarray(embed, draft.markov_embed.dtype),
        markov_head=jnp.asarray(head, draft.markov_head.dtype),
    )


def bigrams(replies: Sequence[Sequence[int]], share: float, vocabulary: int) -> dict[int, int]:
    """Successors of tokens in replies: a share of them right, the others not."""
    rng = random.Random(0)
    found = dict(pair for reply in replies for pair in itertools.pairwise(reply))
    return {
        token: successor if rng.random() < share else (successor + 1) % vocabulary for token, successor in found.items()
    }


def leading_agreement(replies: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> int:
    """Tokens before the first difference of each reply, summed."""
    return sum(
        sum(itertools.takewhile(bool, (ours == theirs for ours, theirs in zip(*pair, strict=True))))
        for pair in zip(replies, expected, strict=True)
    )


def options_of(
    config: ModelConfig, arguments: argparse.Namespace, drafts: bool, *, exact: bool = False
) -> EngineConfig:
    """Options of an engine that runs all prompts at once; `exact` is float32 without activation quantization."""
    page = replay_page(config)
    length = -(-(arguments.prompt_tokens + arguments.new_tokens + 1) // page) * page
    speculation = {"speculative_method": "dspark", "num_speculative_tokens": config.text.dspark_block_size}
    return EngineConfig(
        dtype="float32" if exact else arguments.dtype,
        activation_quantization=not exact,
        kv_cache_block_size=page,
        enable_prefix_caching=False,
        encoder_swa_bounded_replay=False,
        decoder_swa_bounded_replay=False,
        max_num_batched_tokens=max(arguments.batch * arguments.prompt_tokens, 2 * page),
        max_num_seqs=arguments.batch,
        max_model_len=length,
        num_pages=arguments.batch * (length // page),
        vision="off",
        **(speculation if drafts else {}),
    )


@contextlib.contextmanager
def opened(directory: Path, options: EngineConfig, *, calibrates: bool = False) -> Iterator[Engine]:
    """An engine with one prefill shape."""
    with Engine.from_checkpoint(directory, options, warm_up=False, calibrates=calibrates) as engine:
        core, pages = engine.core, engine.core.buckets.decode_pages
        rows = (options.max_num_batched_tokens,)
        few = Buckets(core.buckets.decode_requests, rows, (options.max_num_seqs,), pages, pages)
        core.buckets = dataclasses.replace(few, verify_rows=core.buckets.verify_rows)
        yield engine


def timed(engine: Engine, prompts: Sequence[Prompt], repeats: int) -> tuple[list[tuple[int, ...]], float]:
    """Replies, and the best rate of tokens after the first of each request; one run before compiles."""
    best = 0.0
    for _ in range(repeats + 1):
        results = engine.generate(prompts)
        first = max(result.time_to_first_token_s for result in results)
        last = max(result.time_s for result in results)
        best = max(best, sum(len(result.tokens) - 1 for result in results) / (last - first))
    return [result.tokens for result in results], best


def drafts_of(stored: DraftParameters, replies: Sequence[Sequence[int]], vocabulary: int) -> Iterator[tuple[str, Any]]:
    """Name and weights of every draft."""
    for name, share in QUALITIES.items():
        yield name, stored if share is None else planted(stored, bigrams(replies, share, vocabulary))


def check_tokens(directory: Path, arguments: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Runs every draft at fixed width in float32 without activation quantization.

    Raises:
      AssertionError: a reply differs from the one without drafts.
    """
    config = ModelConfig.from_file(directory / "config.json")
    with opened(directory, options_of(config, arguments, False, exact=True)) as engine:
        replies = [result.tokens for result in engine.generate(prompts)]
    with opened(directory, options_of(config, arguments, True, exact=True)) as engine:
        runner = engine.core.runner
        for name, draft in drafts_of(
            runner.draft_parameters, replies, min(config.text.vocab_size, config.image_token_id)
        ):
            runner.draft_parameters = draft
            found = [result.tokens for result in engine.generate(prompts)]
            if found != replies:
                raise AssertionError(f"{name}: other tokens than without drafts")
    total = sum(map(len, replies))
    return {"check": "float32, activations not quantized", "drafts": list(QUALITIES), "same_tokens": total}


def measurements(directory: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The check of the tokens, then every measurement."""
    config = ModelConfig.from_file(directory / "config.json")
    vocabulary = min(config.text.vocab_size, config.image_token_id)
    ids = np.random.default_rng(arguments.seed).integers(3, vocabulary, (arguments.batch, arguments.prompt_tokens))
    sampling = SamplingParams(max_tokens=arguments.new_tokens, ignore_eos=True)
    prompts = [Prompt(tuple(row.tolist()), sampling) for row in ids]
    common = {"batch": arguments.batch, "new_tokens": arguments.new_tokens}
    yield {**common, **check_tokens(directory, arguments, prompts)}
    common["dtype"] = arguments.dtype
    with opened(directory, options_of(config, arguments, False)) as engine:
        replies, base = timed(engine, prompts, arguments.repeats)
    yield {**common, "draft": None, "width": "off", "tokens_per_second": round(base, 2)}
    options, dynamic = options_of(config, arguments, True), "dynamic" in arguments.widths
    with opened(directory, options, calibrates=dynamic) as engine:
        runner, drafts = engine.core.runner, engine.core.drafts
        assert drafts is not None
        device = jax.devices()[0].device_kind
        identity = running_identity(directory, runner.setup, device=device, weights=engine.weights)
        for name, draft in drafts_of(runner.draft_parameters, replies, vocabulary):
            runner.draft_parameters = draft
            profile = None
            if dynamic:
                drafts.use_profile(None)
                profile = measure_profile(engine, prompts, identity)
            for width in arguments.widths:
                if dynamic:
                    drafts.use_profile(profile if width == "dynamic" else None)
                before = drafts.statistics()
                began = time.perf_counter()
                found, rate = timed(engine, prompts, arguments.repeats)
                seconds = time.perf_counter() - began
                yield {
                    **common,
                    "draft": name,
                    "width": width,
                    "tokens_per_second": round(rate, 2),
                    "of_off": round(rate / base, 3),
                    "same_tokens": leading_agreement(found, replies),
                    **_differences(before, drafts.statistics(), seconds),
                }


def _differences(before: dict[str, Any], after: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What a run did, from totals around it."""
    lengths = np.subtract(after["accepted_lengths"], before["accepted_lengths"])
    offered = int(np.sum(np.subtract(after["offered_by_position"], before["offered_by_position"])))
    blocks = max(int(lengths.sum()), 1)
    return {
        "tokens_per_step": round(float(lengths @ np.arange(1, len(lengths) + 1)) / blocks, 3),
        "proposals_per_step": round(offered / blocks, 3),
        "accepted_lengths": lengths.tolist(),
        "verify_share": round((after["verify_seconds"] - before["verify_seconds"]) / seconds, 3),
        "draft_share": round((after["draft_seconds"] - before["draft_seconds"]) / seconds, 3),
    }


def main(arguments: list[str] | None = None) -> None:
    """Prints every measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="pico")
    parser.add_argument("--model", type=Path, help="a checkpoint directory with a draft, instead of the preset")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the rates")
    parser.add_argument("--widths", nargs="+", choices=("fixed", "dynamic"), default=("fixed", "dynamic"))
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    header = provenance()
    with contextlib.ExitStack() as stack:
        directory = options.model
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
            synthesize(directory, preset(options.preset), scopes=("text", "draft"))
        for record in measurements(directory, options):
            print(json.dumps({**record, **header}), flush=True)


if __name__ == "__main__":
    main()
