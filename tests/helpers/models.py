"""Loaded models for tests: the golden checkpoints and synthesized ones, each opened once per process."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path

import jax.numpy as jnp

from checkpoints.synthesize import synthesize
from tests.helpers import golden
from v41jax.full_forward import LoadedModel, load_model
from v41jax.precision import Precision
from v41jax.presets import preset
from v41jax.reference.model import ReferenceModel

MAX_LEN = 512

_open = contextlib.ExitStack()


@functools.cache
def directory(name: str) -> Path:
    """A golden checkpoint by its name, or a preset synthesized into a temporary directory."""
    if name in golden.CHECKPOINTS:
        return golden.directory(name)
    path = Path(_open.enter_context(tempfile.TemporaryDirectory())) / name
    synthesize(path, preset(name), seed=7, scopes=("text",))
    return path


@functools.cache
def model(
    name: str, dtype: str = "float32", quantized: bool = False, form: str = "dequantized", **geometry: object
) -> LoadedModel:
    """One checkpoint in one precision."""
    precision = Precision(jnp.dtype(dtype), quantized)
    return _open.enter_context(load_model(directory(name), precision, max_model_len=MAX_LEN, form=form, **geometry))


@functools.cache
def reference(name: str, dtype: str = "float32", quantized: bool = False, index_format: str = "fp4") -> ReferenceModel:
    """The float64 model of the same checkpoint with the rounding points of `dtype`."""
    checkpoint = model(name, dtype, quantized).checkpoint
    return _open.enter_context(
        ReferenceModel(
            checkpoint,
            rounding="bfloat16" if dtype == "bfloat16" else "none",
            activation_quantization=quantized,
            index_format=index_format,
        )
    )
