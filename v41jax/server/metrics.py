"""What `/metrics` shows: the engine's own totals, read when asked, and times that the server measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import ASGIApp, Receive, Scope, Send

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
    "prompt_images": ("prompt_images", "Images of admitted requests, reused ones included."),
    "hit_images": ("prefix_hit_images", "Images of admitted requests whose pages were all reused."),
    "vision_encoded": ("images_encoded", "Images that went through the vision tower."),
    "output_tokens": ("generated_tokens", "Tokens generated."),
    "preemptions": ("preemptions", "Times a running request was sent back to the queue."),
    "aborted": ("requests_aborted", "Requests that were cancelled."),
    "refused": ("requests_refused", "Requests that could never run."),
    "finished": ("requests_finished", "Requests that ran to their end."),
    "failed": ("requests_failed", "Requests that were lost because a step failed."),
    "draft_tokens": ("draft_tokens", "Tokens drafted."),
    "accepted_tokens": ("accepted_draft_tokens", "Drafted tokens that were accepted."),
    "recompiles_after_warm_up": ("recompiles", "Programs compiled after warm-up."),
    "draft_calls": ("draft_calls", "Calls of the draft model."),
    "verified_blocks": ("verified_blocks", "Decode steps of single requests, each with the proposals it verified."),
    "verify_seconds": ("verify_seconds", "From the dispatch of decode steps with drafts to their tokens."),
    "draft_seconds": ("draft_seconds", "From the tokens of a step to the block drafted after it."),
}
_LISTS = {
    "offered_by_position": ("offered_draft_tokens_by_position", "Drafted tokens verified.", "position", 1),
    "accepted_by_position": ("accepted_draft_tokens_by_position", "Drafted tokens accepted.", "position", 1),
    "accepted_lengths": ("verified_blocks_by_accepted_length", "Verified blocks.", "accepted", 0),
}
"""Lists: name, text, label, and the label's value of the first entry."""


_TRANSFERS = {
    "searches": "Searches for pages of waiting requests.",
    "timeouts": "Searches that had not ended when their request would wait no longer.",
    "failures": "Searches that ended with an unexpected error.",
    "pages_adopted": "Pages brought to the device.",
    "images_adopted": "State images brought to the device.",
    "pages_unused": "Pages fetched in vain.",
    "pages_saved": "Pages read back for the tiers.",
    "images_saved": "State images read back for the tiers.",
    "saves_dropped": "Pages and images not kept because the tiers could not follow.",
    "wait_seconds": "Seconds that requests whose turn it was waited for pages.",
}
_TIERS = {
    "hits": "Pages found.",
    "misses": "Pages not found.",
    "writes": "Pages written.",
    "evictions": "Pages that had to go for others.",
    "corrupt": "Pages that were not what was written.",
    "errors": "Operations that failed.",
    "skipped": "Operations left out after a failure.",
    "bytes_read": "Bytes of pages found.",
    "bytes_written": "Bytes of pages written.",
    "read_seconds": "Seconds spent in lookups.",
    "write_seconds": "Seconds spent in writes.",
}


def _tier_metrics(values: dict[str, Any]) -> Iterable[Metric]:
    """Of pages beyond the device, one sample a tier."""
    for key, text in _TRANSFERS.items():
        yield CounterMetricFamily(f"{PREFIX}_transfer_{key}", text, value=values["transfers"][key])
    for key, text in _TIERS.items():
        family = CounterMetricFamily(f"{PREFIX}_tier_{key}", text, labels=("tier",))
        for tier, found in values["tiers"].items():
            family.add_metric((tier,), found[key])
        yield family
    for key, text in (("pages", "Pages kept."), ("bytes", "Bytes of pages kept.")):
        gauge = GaugeMetricFamily(f"{PREFIX}_tier_{key}", text, labels=("tier",))
        for tier, found in values["tiers"].items():
            gauge.add_metric((tier,), found[key])
        yield gauge


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
        for key, (name, text, label, first) in _LISTS.items():
            if key in values:
                family = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=[label])
                for number, value in enumerate(values[key], first):
                    family.add_metric([str(number)], value)
                yield family
        if "tiers" in values:
            yield from _tier_metrics(values)


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
        self.open = Gauge(
            f"{PREFIX}_http_open", "Posted requests being answered, streams until their end.", registry=registry
        )
        self.tasks = Gauge(
            f"{PREFIX}_event_loop_tasks", "Tasks of the server's event loop when it was asked.", registry=registry
        )

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)


class CountOpen:
    """ASGI middleware: counts posted requests until their whole answer is sent or given up."""

    def __init__(self, app: ASGIApp, gauge: Gauge):
        self._app = app
        self._gauge = gauge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._gauge.track_inprogress():
            await self._app(scope, receive, send)
