"""Every notebook runs from top to bottom, and its rendered page is of its present text."""

from __future__ import annotations

import json

import jupytext
import pytest

from v41jax import notebook_pages

PATHS = notebook_pages.notebooks()
NAMES = [path.stem for path in PATHS]


@pytest.fixture(scope="module")
def kernel():
    with notebook_pages.kernel() as manager:
        yield manager


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_notebook_runs_from_top_to_bottom(path, kernel, tmp_path):
    notebook = notebook_pages.execute(path, kernel)
    notebook_pages.write_page(path.stem, notebook, tmp_path)
    plots = sorted(file.name for file in tmp_path.glob("*.png"))
    assert plots, "a notebook shows at least one plot"
    kept = sorted(file.name for file in notebook_pages.PAGES.glob(f"{path.stem}_*.png"))
    assert kept == plots, "run python -m v41jax.notebook_pages: the rendered page has other plots"


@pytest.mark.parametrize("path", PATHS, ids=NAMES)
def test_a_rendered_page_is_of_the_present_text(path):
    text = (notebook_pages.PAGES / f"{path.stem}.md").read_text(encoding="utf-8")
    cells = [cell for cell in jupytext.read(path).cells]
    assert notebook_pages.sources(text) == [cell.source for cell in cells if cell.cell_type == "code"]
    for cell in cells:
        if cell.cell_type == "markdown":
            assert cell.source in text
    size = sum(file.stat().st_size for file in notebook_pages.PAGES.glob(f"{path.stem}*"))
    assert size < 400_000, "rendered pages are small"


def test_the_index_lists_every_notebook():
    assert (notebook_pages.PAGES / "README.md").read_text(encoding="utf-8") == notebook_pages.index()


def test_a_failing_cell_fails_the_notebook(kernel, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("# %%\nassert 1 == 2\n")
    with pytest.raises(Exception, match="AssertionError"):
        notebook_pages.execute(path, kernel)


def test_state_of_one_notebook_does_not_reach_the_next(kernel, tmp_path):
    (tmp_path / "one.py").write_text("# %%\nleft_over = 1\n")
    (tmp_path / "two.py").write_text("# %%\nassert 'left_over' not in globals()\n")
    notebook_pages.execute(tmp_path / "one.py", kernel)
    assert json.dumps(notebook_pages.execute(tmp_path / "two.py", kernel))
