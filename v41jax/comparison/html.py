"""A comparison as one HTML page: plots are inline SVG, nothing is fetched."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from v41jax.comparison.report import by_operation, conclusion
from v41jax.comparison.run import Result

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #1c1c1c; background: #fff; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .15rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr:nth-child(even) { background: #f3f5f7; }
.departs { color: #b00020; font-weight: 600; } figure { margin: 1.5rem 0; } figcaption { color: #555; }
svg text { font: 11px system-ui, sans-serif; fill: #444; }
"""
_CELL, _LEFT, _TOP = 18, 170, 24
_LOWEST = 1e-9


def page(result: Result, past_budget: Sequence[str]) -> str:
    """The whole page."""
    title = f"{result.right.text} against {result.left.text}"
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{len(result.prompts)} prompts of {', '.join(map(str, result.prompts))} tokens; layers {result.mode}.</p>",
    ]
    if result.layers:
        parts.append(f"<p class='{'departs' if result.first else ''}'>{html.escape(conclusion(result))}</p>")
    if past_budget:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in past_budget)
        parts.append(f"<h2>Past the budget</h2><ul class='departs'>{lines}</ul>")
    if result.end is not None:
        parts.append("<h2>Logits, free running</h2>" + _end_table(result))
        parts.append(_figure(row_plot(result), "Relative L2 distance of every row's logits, prompt by prompt."))
    if result.layers:
        parts.append("<h2>Layer by layer</h2>")
        caption = "Relative L2 distance (of selections, the share of ids that differ). Framed: departs."
        parts.append(_figure(heat_map(result), caption))
        parts.append(_figure(layer_plot(result), "Distance of the streams after every layer."))
        parts.append(_operation_table(result))
        parts.append(_flip_table(result))
    return "\n".join(parts) + "</html>\n"


def heat_map(result: Result) -> str:
    """Operations by layers, colour the logarithm of the distance."""
    grouped = by_operation(result)
    layers = sorted({item.layer for items in grouped.values() for item in items})
    column = {layer: index for index, layer in enumerate(layers)}
    width, height = _LEFT + _CELL * len(layers) + 10, _TOP + _CELL * len(grouped) + 10
    cells = []
    for index, layer in enumerate(layers):
        cells.append(f"<text x='{_LEFT + index * _CELL + 4}' y='{_TOP - 8}'>{layer}</text>")
    for row, (name, items) in enumerate(grouped.items()):
        y = _TOP + row * _CELL
        cells.append(f"<text x='{_LEFT - 8}' y='{y + 13}' text-anchor='end'>{html.escape(name)}</text>")
        for item in items:
            distance = item.values.relative_l2 if item.values is not None else 1 - item.sets.overlap  # type: ignore[union-attr]
            frame = " stroke='#b00020' stroke-width='2'" if item.departed else ""
            x = _LEFT + column[item.layer] * _CELL
            cells.append(
                f"<rect x='{x}' y='{y}' width='{_CELL - 2}' height='{_CELL - 2}' fill='{colour(distance)}'{frame}>"
                f"<title>layer {item.layer} {html.escape(name)}: {distance:.2e}</title></rect>"
            )
    return _svg(width, height, cells)


def layer_plot(result: Result) -> str:
    """Distance of the streams against the layer, logarithmic."""
    points = [
        (item.layer, item.values.relative_l2)
        for item in result.worst()
        if item.operation == "streams" and item.values is not None
    ]
    return line_plot([points], "layer")


def row_plot(result: Result) -> str:
    """Distance of the logits against the row, one line a prompt, logarithmic."""
    return line_plot([list(enumerate(map(float, rows))) for rows in result.rows], "row")


def line_plot(lines: Sequence[Sequence[tuple[float, float]]], axis: str) -> str:
    """Lines over a shared logarithmic axis; values at or below 1e-9 lie on its floor."""
    width, height, left, bottom = 720, 240, 56, 30
    values = [max(value, _LOWEST) for line in lines for _, value in line if math.isfinite(value)]
    if not values:
        return _svg(width, 20, ["<text x='4' y='14'>nothing to plot</text>"])
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    high = max(high, low + 1)
    last = max((x for line in lines for x, _ in line), default=1) or 1

    def spot(x: float, value: float) -> str:
        finite = min(max(value, _LOWEST), 10.0**high)
        share = (math.log10(finite) - low) / (high - low)
        return f"{left + x / last * (width - left - 10):.1f},{height - bottom - share * (height - bottom - 10):.1f}"

    parts = []
    for power in range(low, high + 1):
        _, y = spot(0, 10.0**power).split(",")
        parts.append(f"<line x1='{left}' x2='{width - 10}' y1='{y}' y2='{y}' stroke='#ddd'/>")
        parts.append(f"<text x='{left - 6}' y='{y}' text-anchor='end'>1e{power}</text>")
    for line in lines:
        path = " ".join(spot(x, value) for x, value in line)
        parts.append(f"<polyline points='{path}' fill='none' stroke='#2266aa' stroke-width='1.5' stroke-opacity='.7'/>")
    parts.append(f"<text x='{width / 2}' y='{height - 6}'>{axis} 0..{last:g}</text>")
    return _svg(width, height, parts)


def colour(distance: float) -> str:
    """White at 1e-9 and below, through blue, to dark red at 1 and above."""
    if not math.isfinite(distance):
        return "#000"
    share = min(max((math.log10(max(distance, _LOWEST)) + 9) / 9, 0), 1)
    if share < 0.5:
        mix = share / 0.5
        return f"rgb({255 - 175 * mix:.0f},{255 - 120 * mix:.0f},{255 - 35 * mix:.0f})"
    mix = (share - 0.5) / 0.5
    return f"rgb({80 + 96 * mix:.0f},{135 - 135 * mix:.0f},{220 - 188 * mix:.0f})"


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    size = f"viewBox='0 0 {width} {height}' width='{width}' height='{height}'"
    return f"<svg xmlns='http://www.w3.org/2000/svg' {size} role='img'>{''.join(parts)}</svg>"


def _figure(content: str, caption: str) -> str:
    return f"<figure>{content}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _end_table(result: Result) -> str:
    end = result.end
    assert end is not None
    names = ("rows", "logits_mean", "logits_max", "max_abs", "cosine", "kl_mean", "kl_max", "top1")
    cells = [f"{getattr(end, name):.6g}" for name in names]
    headings = ("rows", "mean relative L2", "worst row", "max abs", "cosine", "mean KL", "worst KL", "top-1")
    return _table((*headings, "NLL left", "NLL right"), [[*cells, f"{end.nll_left:.4f}", f"{end.nll_right:.4f}"]])


def _operation_table(result: Result) -> str:
    rows = []
    for item in result.worst():
        if item.values is not None:
            v = item.values
            cells = [f"{v.relative_l2:.2e}", f"{v.max_abs:.2e}", f"{v.ulps_max:.0f}", f"{v.cosine:.8f}", "", ""]
        else:
            assert item.sets is not None
            cells = ["", "", "", "", f"{item.sets.overlap:.4%}", f"{item.sets.border_margin:.2e}"]
        departs = f"{len(item.departed)} rows" if item.departed else ""
        rows.append([item.operation, str(item.layer), *cells, str(item.flips), departs])
    headings = ("operation", "layer", "relative L2", "max abs", "ulps", "cosine", "overlap", "border margin")
    return _table((*headings, "flips", "departs"), rows)


def _flip_table(result: Result) -> str:
    if not result.flips:
        return ""
    rows = [
        [flip.operation, str(flip.layer), str(list(flip.index)), f"{flip.left:.8g}", f"{flip.right:.8g}"]
        for flip in result.flips[:500]
    ]
    return "<h2>Rounding flips</h2>" + _table(("operation", "layer", "index", "left", "right"), rows)
