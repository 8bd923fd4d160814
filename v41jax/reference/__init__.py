"""A float64 NumPy model written from the model specification alone; the judge of every other implementation.

It shares the config, the checkpoint reader, the NumPy codecs and the Engram hash with the serving code, and nothing
of its layers.
"""

from v41jax.reference.model import ReferenceModel
from v41jax.reference.numerics import Arithmetic
from v41jax.reference.records import (
    FROM_FORWARD,
    FROM_STATE,
    HIDDEN,
    ForwardInputs,
    ForwardMemory,
    LayerRecord,
    LayerVisibility,
    ReferenceOutput,
    SequenceState,
)

__all__ = [
    "FROM_FORWARD",
    "FROM_STATE",
    "HIDDEN",
    "Arithmetic",
    "ForwardInputs",
    "ForwardMemory",
    "LayerRecord",
    "LayerVisibility",
    "ReferenceModel",
    "ReferenceOutput",
    "SequenceState",
]
