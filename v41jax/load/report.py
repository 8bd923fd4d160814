"""From samples to a report: percentiles of times, rates, the cached share, and how many requests were good enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from v41jax.load.client import Sample

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], rank: float) -> float:
    """The smallest value that at least `rank` percent of the values do not exceed; `values` is not empty."""
    ordered = sorted(values)
    return ordered[max(math.ceil(rank / 100 * len(ordered)), 1) - 1]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum; empty without values."""
    if not values:
        return {}
    marks = {f"p{rank}": percentile(values, rank) for rank in PERCENTILES}
    return {"mean": sum(values) / len(values), **marks, "max": max(values)}


def make_report(
    samples: Sequence[Sample], seconds: float, *, first_slo_s: float = math.inf, per_token_slo_s: float = math.inf
) -> dict[str, Any]:
    """The numbers of one load.

    Args:
      samples: of every request.
      seconds: the load took.
      first_slo_s: a good request has its first token by then.
      per_token_slo_s: and this much time for each token after it.
    """
    done = [sample for sample in samples if sample.error is None]
    prompt, cached = sum(sample.prompt_tokens for sample in done), sum(sample.cached_tokens for sample in done)
    output = sum(sample.output_tokens for sample in done)
    good = [
        sample
        for sample in done
        if sample.first_s is not None
        and sample.first_s <= first_slo_s
        and (sample.per_token_s is None or sample.per_token_s <= per_token_slo_s)
    ]
    errors = [sample.error for sample in samples if sample.error is not None]
    report: dict[str, Any] = {
        "requests": len(samples),
        "failed": len(errors),
        "seconds": seconds,
        "requests_per_s": len(done) / seconds,
        "goodput_per_s": len(good) / seconds,
        "good_share": len(good) / len(samples) if samples else 0.0,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": cached / prompt if prompt else 0.0,
        "output_tokens": output,
        "output_tokens_per_s": output / seconds,
        "time_to_first_token_s": spread([sample.first_s for sample in done if sample.first_s is not None]),
        "time_per_output_token_s": spread([value for sample in done if (value := sample.per_token_s) is not None]),
        "request_s": spread([sample.whole_s for sample in done]),
    }
    if errors:
        report["first_errors"] = errors[:5]
    turns = sorted({sample.turn for sample in done})
    if len(turns) > 1:
        report["turns"] = [_turn([sample for sample in done if sample.turn == turn]) for turn in turns]
    return report


def _turn(samples: Sequence[Sample]) -> dict[str, Any]:
    """How one turn of the agents went: prompts grow, and what is not cached should not."""
    prompt, cached = sum(sample.prompt_tokens for sample in samples), sum(sample.cached_tokens for sample in samples)
    firsts = [sample.first_s for sample in samples if sample.first_s is not None]
    return {
        "requests": len(samples),
        "mean_prompt_tokens": prompt / len(samples),
        "cached_share": cached / prompt if prompt else 0.0,
        "time_to_first_token_p50_s": percentile(firsts, 50) if firsts else None,
    }
