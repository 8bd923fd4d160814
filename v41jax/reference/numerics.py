"""Elementary arithmetic of the reference: where values are rounded, RMSNorm, rotary tables, and the quantizers.

Everything is float64 except where the model specification names a rounding; the two rounding policies are
"bfloat16" (the released rounding points) and "none".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from v41jax import quantization_numpy as codecs
from v41jax.config import TextConfig

Float = NDArray[np.float64]
Quantizer = Callable[[NDArray[np.float32]], NDArray[np.float32]]

ROUNDINGS = ("none", "bfloat16")
INDEX_FORMATS = ("fp4", "fp8")

_BFLOAT16_MIN_NORMAL = 2.0**-126
_BFLOAT16_SUBNORMAL_STEP = 2.0**-133


def round_to_bfloat16(x: Float) -> Float:
    """float64 -> nearest bfloat16 value, ties to even, in one rounding (no detour through float32); same shape."""
    x = np.asarray(x, np.float64)
    bits = x.view(np.uint64)
    kept = np.uint64(45)  # 52 mantissa bits of float64 less the 7 of bfloat16
    odd = (bits >> kept) & np.uint64(1)
    rounded = ((bits + (np.uint64((1 << 44) - 1) + odd)) >> kept << kept).view(np.float64)
    subnormal = np.round(x / _BFLOAT16_SUBNORMAL_STEP) * _BFLOAT16_SUBNORMAL_STEP
    rounded = np.where(np.abs(x) < _BFLOAT16_MIN_NORMAL, subnormal, rounded)
    rounded = np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, x), rounded)
    return np.where(np.isfinite(x), rounded, x)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The switches of a reference run.

    Attributes:
      rounding: "bfloat16" rounds wherever the specification writes bf16; "none" never does.
      activation_quantization: apply the activation formats; off makes each the identity.
      index_rounding: "bfloat16" rounds the index dot, each product with a head weight, and the head sum.
      index_format: "fp4" quantizes index keys and queries as trained (Q4m); "fp8" as the FP8 index plane does.
      probe: called instead of every quantizer (the identity with activation quantization off) with (site, values,
        quantizer) and returns the quantized values; a comparison uses it to see how near a value lies to a rounding
        boundary, or to put one on the other side.
    """

    rounding: str = "none"
    activation_quantization: bool = True
    index_rounding: str = "none"
    index_format: str = "fp4"
    probe: Callable[[str, Float, Callable[[Float], Float]], Float] | None = None

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value!r}, must be one of {', '.join(choices)}"
            for name, value, choices in (
                ("rounding", self.rounding, ROUNDINGS),
                ("index_rounding", self.index_rounding, ROUNDINGS),
                ("index_format", self.index_format, INDEX_FORMATS),
            )
            if value not in choices
        ]
        if faults:
            raise ValueError("; ".join(faults))

    def activation(self, x: Float) -> Float:
        """A bf16 rounding point."""
        return round_to_bfloat16(x) if self.rounding == "bfloat16" else x

    def index_score(self, x: Float) -> Float:
        """A rounding point of the published index score path (model specification, "Indexer")."""
        return round_to_bfloat16(x) if self.index_rounding == "bfloat16" else x

    def q8(self, x: Float, site: str) -> Float:
        """Linear inputs and window rows."""
        return self._quantized(codecs.fake_q8, x, site)

    def q4n(self, x: Float, site: str) -> Float:
        """Compressed rows."""
        return self._quantized(codecs.fake_q4n, x, site)

    def index_key(self, x: Float, site: str) -> Float:
        """Rotated index keys, [..., I]."""
        return self._quantized(codecs.fake_q4m if self.index_format == "fp4" else _fake_index_key_fp8, x, site)

    def index_query(self, x: Float, site: str) -> Float:
        """Rotated index queries, [..., I]."""
        return self._quantized(codecs.fake_q4m if self.index_format == "fp4" else _fake_index_query_fp8, x, site)

    def _quantized(self, quantizer: Quantizer, x: Float, site: str) -> Float:
        def quantize(values: Float) -> Float:
            if not self.activation_quantization:
                return values
            return quantizer(values.astype(np.float32)).astype(np.float64)

        return quantize(x) if self.probe is None else self.probe(site, x, quantize)


def _fake_index_key_fp8(x: NDArray[np.float32]) -> NDArray[np.float32]:
    codes, scale = codecs.quantize_index_key_fp8(x)
    return codecs.decode_e4m3(codes) * scale[..., None]


def _fake_index_query_fp8(x: NDArray[np.float32]) -> NDArray[np.float32]:
    codes, scale = codecs.quantize_index_query_fp8(x)
    return codecs.decode_e4m3(codes) * scale[..., None]


def sigmoid(x: Float) -> Float:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def rms_norm(x: Float, weight: Float, eps: float, arithmetic: Arithmetic) -> Float:
    """[..., n] over the last axis, one rounding at the end (model specification, "RMSNorm")."""
    scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    return arithmetic.activation(weight * (x * scale))


def rope_frequencies(text: TextConfig, *, compressed: bool) -> NDArray[np.float32]:
    """Angular frequency of every rotary pair, [qk_rope_head_dim / 2] float32.

    The power is float64 rounded once; the reciprocal and the YaRN blend are float32.

    Args:
      text: the text configuration.
      compressed: True for layers of ratio > 0 (YaRN over `compress_rope_theta`), False for window-only layers.

    Source: model specification, "RoPE".
    """
    width = text.qk_rope_head_dim
    base = text.compress_rope_theta if compressed else text.rope_theta
    pair = np.arange(width // 2)
    omega = np.float32(1) / (float(base) ** (2.0 * pair / width)).astype(np.float32)
    if not compressed:
        return omega
    yarn = text.rope_scaling

    def correction(rotations: float) -> float:
        span = yarn.original_max_position_embeddings / (2 * math.pi * rotations)
        return width * math.log(span) / (2 * math.log(base))

    low = max(math.floor(correction(yarn.beta_fast)), 0)
    high = min(math.ceil(correction(yarn.beta_slow)), width - 1)
    extent = np.float32(max(high - low, 1e-3))
    ramp = np.clip((pair.astype(np.float32) - np.float32(low)) / extent, np.float32(0), np.float32(1))
    keep = np.float32(1) - ramp
    return (omega / np.float32(yarn.factor)) * (np.float32(1) - keep) + omega * keep


def rope_tables(frequencies: NDArray[np.float32], positions: NDArray[np.int64]) -> tuple[Float, Float]:
    """(cos, sin), each [n, pairs]: float32 angle, float64 functions, rounded to float32 and widened."""
    angle = positions.astype(np.float32)[:, None] * frequencies
    angle = angle.astype(np.float64)
    return np.cos(angle).astype(np.float32).astype(np.float64), np.sin(angle).astype(np.float32).astype(np.float64)


def rotate(x: Float, cos: Float, sin: Float, arithmetic: Arithmetic) -> Float:
    """Rotates adjacent pairs of the trailing dimensions.

    Args:
      x: [n, d] or [n, heads, d].
      cos: [n, pairs]; sin: [n, pairs], negated for the inverse rotation.

    Source: model specification, "RoPE".
    """
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    width = 2 * cos.shape[-1]
    head, tail = x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :]
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(tail.shape)
    return np.concatenate([head, arithmetic.activation(turned)], axis=-1)
