"""The `v41jax` command: its subcommands and how their errors reach the user.

Every error a user can mend is a `ValueError` or `OSError`: one line a fault on standard error, exit code 2. A check
that ran and failed exits with 1. Anything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import sys

import typer

from v41jax.commands import bench_serve, checkpoint, compare, generate, logits, serve

app = typer.Typer(
    name="v41jax",
    help="DeepSeek-V4.1 in JAX: serve it, compare it with its reference, take it apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("compare")(compare.compare)
app.command("generate")(generate.generate)
app.command("logits")(logits.logits)
app.command("serve")(serve.serve)
bench = typer.Typer(no_args_is_help=True, help="Measure.")
bench.command("serve")(bench_serve.serve)
app.add_typer(bench, name="bench")


def fault_lines(error: Exception) -> list[str]:
    """One line per fault of an error the user can mend."""
    faults = getattr(error, "faults", None)
    if faults:
        return [str(fault) for fault in faults]
    if isinstance(error, OSError) and error.filename is not None:
        return [f"{error.filename}: {error.strerror}"]
    return [" ".join(str(error).split()) or type(error).__name__]


def main() -> None:
    """Runs the command line and exits."""
    try:
        app()
    except (ValueError, OSError) as error:
        for line in fault_lines(error):
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
