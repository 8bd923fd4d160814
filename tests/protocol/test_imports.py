"""The protocol stands alone: standard library and itself, so that it can be used without jax."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import v41jax.protocol

ALLOWED = set(sys.stdlib_module_names)


def test_the_protocol_imports_only_the_standard_library_and_itself():
    files = sorted(Path(v41jax.protocol.__file__).parent.glob("*.py"))
    assert len(files) > 10
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in ALLOWED or name.startswith("v41jax.protocol"), f"{file.name}: {name}"
