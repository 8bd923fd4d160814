"""The `v41jax` command: its subcommands and how their errors reach the user.

Every error a user can mend is a `ValueError` or `OSError`: one line a fault on standard error, exit code 2. A check
that ran and failed exits with 1. Anything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import sys

import typer

from v41jax.commands import bench, bench_serve, calibrate, checkpoint, compare, generate, logits, plan, serve

_UsageError = typer.BadParameter.__bases__[0]
"""Any error of arguments; typer has it under a public name only by its subclass."""

app = typer.Typer(
    name="v41jax",
    help="DeepSeek-V4.1 in JAX: serve it, compare it with its reference, take it apart.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(checkpoint.app, name="checkpoint")
app.command("calibrate")(calibrate.calibrate)
app.command("compare")(compare.compare)
app.command("generate")(generate.generate)
app.command("logits")(logits.logits)
app.command("plan")(plan.plan)
app.command("serve")(serve.serve)
benches = typer.Typer()
benches.callback(invoke_without_command=True)(bench.bench)
benches.command("serve")(bench_serve.serve)
app.add_typer(benches, name="bench")


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
        code = app(standalone_mode=False)
    except _UsageError as error:
        # Without arguments help was printed and nothing is left to say.
        message = " ".join(error.format_message().split())
        if message:
            print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except (ValueError, OSError) as error:
        for line in fault_lines(error):
            print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code or 0)
