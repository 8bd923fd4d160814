"""Routed-expert cases and what they mean, one row and one expert at a time, in float64 between rounding points."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.grouped_experts import ExpertWeights
from v41jax import quantization_numpy as quantization


@dataclasses.dataclass
class ExpertCase:
    """Arguments of `grouped_experts`; `decoded` holds the float32 matrices (w1, w3, w2)."""

    x: np.ndarray
    expert_ids: np.ndarray
    weights: np.ndarray
    stored: tuple
    decoded: tuple
    valid: np.ndarray

    def arrays(self, dequantized=None):
        """(x, ids, weights, w1, w3, w2) as JAX arrays; `dequantized`: a dtype for the matrices."""
        matrices = self.stored
        if dequantized is not None:
            matrices = tuple(jnp.asarray(m, dequantized) for m in self.decoded)
        return jnp.asarray(self.x), jnp.asarray(self.expert_ids), jnp.asarray(self.weights), *matrices


def expert_case(seed, *, rows, experts, chosen, width=64, hidden=32, dtype=jnp.float32, padding=0, poison_unused=True):
    """Random rows. Experts no valid row chose are NaN; padding rows choose experts and hold NaN."""
    rng = np.random.default_rng(seed)
    count = rows + padding
    ids = np.argsort(rng.random((count, experts)), axis=1)[:, :chosen].astype(np.int32)
    valid = np.arange(count) < rows
    x = quantization.fake_q8(np.asarray(jnp.asarray(rng.normal(size=(count, width)), dtype)))
    x[~valid] = np.nan
    stored, decoded = [], []
    for outputs, inputs in ((hidden, width), (hidden, width), (width, hidden)):
        packed = rng.integers(0, 256, (experts, outputs, inputs // 2)).astype(np.uint8)
        scales = rng.integers(122, 126, (experts, outputs, inputs // 32)).astype(np.uint8)
        if poison_unused:
            scales[np.setdiff1d(np.arange(experts), ids[valid])] = 255
        stored.append(ExpertWeights(jnp.asarray(packed), jnp.asarray(scales)))
        decoded.append(quantization.dequantize_expert(packed, scales))
    weights = rng.random((count, chosen)).astype(np.float32)
    return ExpertCase(x, ids, weights, tuple(stored), tuple(decoded), valid)


def rounded(x, dtype):
    return np.asarray(jnp.asarray(np.asarray(x, np.float32), dtype)).astype(np.float32)


def experts_oracle(case, *, swiglu_limit, quantize_hidden):
    """[N, D] float64: every rounding point of the contract, products in float64, experts in ascending id."""
    dtype = case.x.dtype
    out = np.zeros(case.x.shape)
    w1, w3, w2 = (m.astype(np.float64) for m in case.decoded)
    for n in np.flatnonzero(case.valid):
        x = case.x[n].astype(np.float64)
        for column in np.argsort(case.expert_ids[n]):
            e = case.expert_ids[n, column]
            if not 0 <= e < len(w1):
                continue
            gate, up = (rounded(w[e] @ x, dtype).astype(np.float64) for w in (w1, w3))
            if swiglu_limit > 0:
                gate, up = np.minimum(gate, swiglu_limit), np.clip(up, -swiglu_limit, swiglu_limit)
            hidden = rounded(case.weights[n, column] * (gate / (1 + np.exp(-gate)) * up), dtype)
            if quantize_hidden:
                hidden = quantization.fake_q8(hidden)
            out[n] += rounded(w2[e] @ hidden.astype(np.float64), dtype)
    return out
