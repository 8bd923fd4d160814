"""Pages that are made from the code are what the code makes, and pages name files that exist."""

import dataclasses
import re
from pathlib import Path

import pytest

from scheduler.runtime_config import EngineConfig
from v41jax import configuration_page

ROOT = Path(__file__).resolve().parent.parent.parent
ARCHITECTURE = sorted((ROOT / "docs" / "architecture").glob("*.md"))
SOURCES = ("v41jax", "scheduler", "checkpoints", "pallas_kernels", "tests", "benchmarks")


def test_the_configuration_reference_is_of_the_present_code():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert text == configuration_page.page(), "run python -m v41jax.configuration_page --out docs/configuration.md"


def test_every_engine_option_is_described():
    described = configuration_page.attributes_of(EngineConfig)
    assert set(described) >= {field.name for field in dataclasses.fields(EngineConfig)}
    assert described["num_pages"] == "PAGE units of the pool of every data shard; None sizes it from memory."


@pytest.mark.parametrize("page", ARCHITECTURE, ids=[page.stem for page in ARCHITECTURE])
def test_a_subsystem_page_has_a_diagram_and_names_files_that_exist(page):
    text = page.read_text(encoding="utf-8")
    assert "```mermaid" in text
    for name in re.findall(r"`([\w/.*]+)`", text):
        if name.startswith(tuple(f"{source}/" for source in SOURCES)):
            assert list(ROOT.glob(name.rstrip("/"))), name
    for row in re.findall(r"^\|[^|]+\|([^|]+)\|$", text, flags=re.MULTILINE):
        paths = re.findall(r"`([\w/*]+\.py)`", row)
        home = Path(paths[0]).parent if paths else Path()
        for name in paths[1:]:
            assert (ROOT / name).exists() or (ROOT / home / name).exists(), name


def test_every_package_has_a_room():
    """A newcomer finds the page of any file: every module is named, or its directory is."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in [ROOT / "docs/architecture.md", *ARCHITECTURE])
    missing = []
    for package in ("v41jax", "scheduler", "checkpoints"):
        for path in sorted((ROOT / package).glob("*.py")):
            stem = path.name
            if stem.startswith("__") or stem in text or f"{package}/{stem}" in text:
                continue
            if any(path.match(pattern) for pattern in re.findall(r"`([\w/]+\*[\w/.]*)`", text)):
                continue
            missing.append(f"{package}/{stem}")
    assert not missing, "named in no page of docs/architecture: " + ", ".join(missing)
