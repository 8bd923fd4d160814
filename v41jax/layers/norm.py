"""RMS normalization with one rounding, at the end. It is defined where its kernel is."""

from __future__ import annotations

from pallas_kernels.quantized_rows.xla import rms_norm

__all__ = ["rms_norm"]
