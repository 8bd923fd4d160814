"""Greedy replies of an engine with and without drafts, for what compares their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from scheduler.runtime_config import EngineConfig
from scheduler.sequence import SamplingParams
from v41jax.config import ModelConfig
from v41jax.engine import Engine
from v41jax.engine_requests import Prompt
from v41jax.replay_distance import replay_page


def replies(
    directory: Path, prompts: Sequence[NDArray], new_tokens: int, dtype: str, quantized: bool, drafts: int
) -> tuple[list[tuple[int, ...]], dict[str, Any]]:
    """Greedy replies of an engine with caches as released, all prompts in one batch, and its statistics.

    Args:
      directory: checkpoint.
      prompts: token ids, [n] each.
      new_tokens: of every reply.
      dtype: of activations.
      quantized: activation quantization.
      drafts: proposals of a step; 0 is no drafts.
    """
    page = replay_page(ModelConfig.from_file(directory / "config.json"))
    longest, total = max(len(prompt) for prompt in prompts), sum(len(prompt) for prompt in prompts)
    length = -(-(longest + new_tokens + 1) // page) * page
    options = EngineConfig(
        dtype=dtype,
        activation_quantization=quantized,
        kv_cache_block_size=page,
        max_num_batched_tokens=max(total, 2 * page),
        max_num_seqs=len(prompts),
        decode_buckets=(len(prompts),),
        max_model_len=length,
        num_pages=len(prompts) * (length // page),
        vision="off",
        speculative_method="dspark" if drafts else None,
        num_speculative_tokens=drafts,
    )
    sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    with Engine.from_checkpoint(directory, options, warm_up=False) as engine:
        results = engine.generate([Prompt(tuple(prompt.tolist()), sampling) for prompt in prompts])
        return [result.tokens for result in results], engine.statistics()
