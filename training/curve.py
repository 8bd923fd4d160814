"""The loss curve of a run as a picture: `python -m training.curve RUN/log.jsonl loss.png` (matplotlib needed)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

CURVES = {
    "the miniature": ("target", "replay"),
    "dense baseline, same time": ("baseline", "cooldown"),
    "dense baseline, same batches": ("matched",),
}
"""Name in the legend -> phases that follow each other."""


def points(lines: Iterable[str], phases: tuple[str, ...]) -> tuple[list[float], list[float]]:
    """Tokens in millions and loss in nats of the logged steps of some phases, in order.

    Args:
      lines: of a run's log.
      phases: which to take.
    """
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if record.get("phase") in phases and "loss" in record]
    steps.sort(key=lambda record: record["step"])
    return [record["tokens"] / 1e6 for record in steps], [record["loss"] for record in steps]


def draw(log: Path, picture: Path) -> None:
    """Draws the curves of a log that `python -m training` wrote."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = log.read_text(encoding="utf-8").splitlines()
    figure, axes = pyplot.subplots(figsize=(8, 4))
    for name, phases in CURVES.items():
        tokens, losses = points(lines, phases)
        if tokens:
            axes.plot(tokens, losses, label=name, linewidth=1)
    axes.set(xlabel="training tokens, millions", ylabel="training loss, nats a token", ylim=(1.8, 4))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def main() -> None:
    """Parses the two paths."""
    parser = argparse.ArgumentParser(prog="python -m training.curve", description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    draw(options.log, options.picture)


if __name__ == "__main__":
    main()
