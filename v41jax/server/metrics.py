"""What `/metrics` shows: the engine's own totals, read when asked, and times that the server measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "v41jax"
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_EACH_TOKEN = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
_WHOLE = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)

_GAUGES = {
    "queue": ("requests_waiting", "Requests that wait for a slot."),
    "running": ("requests_running", "Requests that hold a slot."),
    "partial": ("requests_in_prefill", "Running requests whose prompt is not computed yet."),
    "pages_total": ("pages", "Pages of the pool."),
    "pages_used": ("pages_used", "Pages that running requests hold."),
    "pages_cached": ("pages_cached", "Free pages whose content can be reused."),
    "pages_vacant": ("pages_vacant", "Free pages without content."),
    "slots_free": ("slots_free", "State slots that nobody holds."),
    "images": ("checkpoint_images", "Checkpoint images kept."),
}
_COUNTERS = {
    "steps": ("steps", "Forwards run."),
    "prefill_steps": ("prefill_steps", "Prefill forwards run."),
    "decode_steps": ("decode_steps", "Decode forwards run."),
    "rows_scheduled": ("rows", "Rows of all forwards."),
    "rows_replayed": ("rows_replayed", "Rows that recomputed cached tokens."),
    "rows_saved": ("rows_saved", "Decoder rows that bounded replay left out."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests, reused ones included."),
    "hit_tokens": ("prefix_hit_tokens", "Prompt tokens whose pages were reused."),
    "output_tokens": ("generated_tokens", "Tokens generated."),
    "preemptions": ("preemptions", "Times a running request was sent back to the queue."),
    "aborted": ("requests_aborted", "Requests that were cancelled."),
    "refused": ("requests_refused", "Requests that could never run."),
    "finished": ("requests_finished", "Requests that ran to their end."),
    "draft_tokens": ("draft_tokens", "Tokens drafted."),
    "accepted_tokens": ("accepted_draft_tokens", "Drafted tokens that were accepted."),
    "recompiles_after_warm_up": ("recompiles", "Programs compiled after warm-up."),
}


class _EngineTotals:
    """Collector that reads the engine when metrics are asked for; numbers an engine does not have are left out."""

    def __init__(self, statistics: Callable[[], dict[str, Any]]):
        self._statistics = statistics

    def collect(self) -> Iterable[Metric]:
        values = self._statistics()
        for key, (name, text) in _GAUGES.items():
            if key in values:
                yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=values[key])
        for key, (name, text) in _COUNTERS.items():
            if key in values:
                yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=values[key])


class Metrics:
    """Metrics of one server, in a registry of their own.

    Args:
      statistics: of the engine.
    """

    def __init__(self, statistics: Callable[[], dict[str, Any]]):
        registry = self._registry = CollectorRegistry()
        registry.register(_EngineTotals(statistics))
        ProcessCollector(registry=registry)
        self.first_token = Histogram(
            f"{PREFIX}_time_to_first_token_seconds",
            "From arrival to the first token.",
            buckets=_FIRST_TOKEN,
            registry=registry,
        )
        self.each_token = Histogram(
            f"{PREFIX}_time_per_output_token_seconds",
            "Mean time between the tokens of a choice after its first.",
            buckets=_EACH_TOKEN,
            registry=registry,
        )
        self.whole = Histogram(
            f"{PREFIX}_request_seconds", "From arrival to the end of a choice.", buckets=_WHOLE, registry=registry
        )
        self.answers = Counter(
            f"{PREFIX}_http_answers", "Answers by route and status.", ("route", "status"), registry=registry
        )
        self.choices = Counter(f"{PREFIX}_choices", "Choices by why they ended.", ("reason",), registry=registry)
        self.open = Gauge(f"{PREFIX}_http_open", "Generation requests being answered.", registry=registry)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)
