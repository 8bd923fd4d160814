"""`python -m training`: one command that trains, exports and evaluates the miniature, whole or by phases."""

from __future__ import annotations

import argparse
from pathlib import Path

from training.run import Options, Run

PHASES = ("target", "baseline", "replay", "cooldown", "matched", "draft", "export", "evaluate", "acceptance")

ALL = ("target", "replay", "matched", "draft", "export", "evaluate", "acceptance")
"""What one command does; the baseline of equal time is better run beside the target, as a second process."""


def main() -> None:
    """Parses arguments and runs the phases."""
    parser = argparse.ArgumentParser(prog="python -m training", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="directory that training.data wrote")
    parser.add_argument("--out", type=Path, required=True, help="receives states, snapshots, log.jsonl and nano/")
    parser.add_argument("--phase", default="all", help=f"all ({', '.join(ALL)}), or some of {', '.join(PHASES)}")
    parser.add_argument("--seconds", help="wall time of each phase that trains: one number, or one a phase (380,200)")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--inner", type=int, default=10, help="steps of one call from the host")
    parser.add_argument("--generated", type=int, default=2048, help="continuations made for the draft")
    parser.add_argument("--windows", type=int, default=512, help="most held-out windows that are measured")
    parser.add_argument("--toy", action="store_true", help="the small configuration of the tests")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    phase = given.pop("phase")
    wanted = ALL if phase == "all" else tuple(phase.split(","))
    unknown = [name for name in wanted if name not in PHASES]
    if unknown:
        parser.error(f"unknown phase {unknown[0]}; choose from all, {', '.join(PHASES)}")
    given["seconds"] = _seconds(parser, given["seconds"], wanted)
    run = Run(Options(**given))
    for name in wanted:
        getattr(run, name)()


def _seconds(parser: argparse.ArgumentParser, text: str | None, wanted: tuple[str, ...]) -> dict[str, float]:
    """Seconds by phase."""
    if text is None:
        return {}
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        parser.error(f"--seconds {text!r} must be numbers, separated by commas")
    if len(numbers) not in (1, len(wanted)):
        parser.error(f"--seconds gives {len(numbers)} numbers for {len(wanted)} phases: give one, or one for each")
    return dict(zip(wanted, numbers * len(wanted) if len(numbers) == 1 else numbers))


if __name__ == "__main__":
    main()
