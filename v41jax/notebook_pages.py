"""Notebooks kept as text: executing them, and their rendered pages in `docs/notebooks/`.

    python -m v41jax.notebook_pages            # executes every notebook and writes its page
    python -m v41jax.notebook_pages tour_of_a_forward

All notebooks of a run share one kernel, emptied between them, so that a library is imported once.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = ROOT / "notebooks"
PAGES = ROOT / "docs" / "notebooks"

_SETUP = """%reset -f
import matplotlib
import matplotlib.pyplot
matplotlib.pyplot.close("all")
matplotlib.rcParams["figure.dpi"] = 80
matplotlib.rcParams["figure.autolayout"] = False
"""
_TIMEOUT_S = 300
_NOISE = re.compile(r"\x1b\[[0-9;]*m")


def main() -> None:
    """Executes notebooks and writes their pages."""
    parser = argparse.ArgumentParser(description="Executes notebooks and writes docs/notebooks.")
    parser.add_argument("names", nargs="*", help="notebooks without their suffix; none means all")
    names = parser.parse_args().names
    paths = [path for path in notebooks() if not names or path.stem in names]
    with kernel() as manager:
        for path in paths:
            write_page(path.stem, execute(path, manager), PAGES)
            print(path.stem)
    (PAGES / "README.md").write_text(index(), encoding="utf-8")


def notebooks() -> list[Path]:
    """Every notebook, by name."""
    return sorted(NOTEBOOKS.glob("*.py"))


@contextlib.contextmanager
def kernel() -> Iterator[AsyncKernelManager]:
    """A kernel that starts with the first notebook and sees the repository's packages."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    manager = AsyncKernelManager(kernel_name="python3")
    try:
        yield manager
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
        if manager.has_kernel:
            from jupyter_core.utils import run_sync

            run_sync(manager.shutdown_kernel)(now=True)


def execute(path: Path, manager: AsyncKernelManager) -> Any:
    """The notebook with its outputs.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell that fails.
    """
    notebook = jupytext.read(path)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(_SETUP))
    NotebookClient(notebook, km=manager, timeout=_TIMEOUT_S, resources={"metadata": {"path": str(ROOT)}}).execute()
    del notebook.cells[0]
    return notebook


def write_page(name: str, notebook: Any, directory: Path) -> None:
    """`NAME.md` and `NAME_1.png`, ...; plots of an earlier page of that name are removed."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob(f"{name}_*.png"):
        old.unlink()
    text, plots = page(name, notebook)
    (directory / f"{name}.md").write_text(text, encoding="utf-8")
    for file, content in plots.items():
        (directory / file).write_bytes(content)


def page(name: str, notebook: Any) -> tuple[str, dict[str, bytes]]:
    """Markdown of an executed notebook, and its plots by file name."""
    parts = [f"<!-- Rendered from notebooks/{name}.py by `python -m v41jax.notebook_pages`. -->"]
    plots: dict[str, bytes] = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}_{len(plots) + 1}.png"
                plots[file] = base64.b64decode(data["image/png"])
                parts.append(f"![plot {len(plots)}]({file})")
                continue
            text = output.get("text", data.get("text/plain", ""))
            if output.get("name") != "stderr" and text.strip():
                parts.append("```text\n" + _NOISE.sub("", text).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n", plots


def sources(text: str) -> list[str]:
    """Code cells of a rendered page."""
    return re.findall(r"```python\n(.*?)\n```", text, flags=re.DOTALL)


def index() -> str:
    """`docs/notebooks/README.md`: every page with its title."""
    lines = ["# Notebooks", "", "Kept as text in `notebooks/`, executed by the tests, rendered by", ""]
    lines += ["```console", "$ python -m v41jax.notebook_pages", "```", ""]
    for path in notebooks():
        lines.append(f"* [{title(jupytext.read(path).cells)}]({path.stem}.md)")
    return "\n".join(lines) + "\n"


def title(cells: Sequence[Any]) -> str:
    """The first heading."""
    return next(line.removeprefix("# ") for cell in cells for line in cell.source.splitlines() if line.startswith("# "))


if __name__ == "__main__":
    main()
