"""Both kernels that join the splits of sparse attention on GPUs, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_attention import joining

ROWS, HEADS, WIDTH, ROTATED = 3, 5, 256, 32


def case(splits):
    """Sums, peaks and totals as walks leave them; the last row is padding, one split of the first has no keys."""
    random = np.random.default_rng(splits)
    sums = random.normal(size=(ROWS, splits, HEADS, WIDTH)).astype(np.float32)
    peaks = random.normal(size=(ROWS, splits, HEADS)).astype(np.float32) * 4
    totals = random.uniform(1, 3, size=peaks.shape).astype(np.float32)
    sums[0, 1], peaks[0, 1], totals[0, 1] = 0, -1e30, 0
    sums[-1], totals[-1], peaks[-1] = np.nan, np.nan, np.nan
    sinks = random.normal(size=(2, HEADS)).astype(np.float32)
    angles = random.uniform(0, 6, size=(ROWS, ROTATED // 2))
    batch_ids = np.array([0, 1, -1], np.int32)
    return (sums, peaks, totals), sinks, np.cos(angles), np.sin(angles), batch_ids


def expected(results, sink, cos, sin):
    sums, peaks, totals = (part.astype(np.float64) for part in results)
    peak = peaks.max(axis=1, keepdims=True)
    shares = np.exp2(peaks - peak)
    total = (shares * totals).sum(axis=1) + np.exp(sink) * np.exp2(-peak[:, 0])
    out = (shares[..., None] * sums).sum(axis=1) / total[..., None]
    first, second = out[..., -ROTATED::2].copy(), out[..., 1 - ROTATED :: 2].copy()
    cos, sin = cos[:, None], sin[:, None]
    out[..., -ROTATED::2] = first * cos + second * sin
    out[..., 1 - ROTATED :: 2] = second * cos - first * sin
    return out


@pytest.mark.parametrize("splits", [2, 15, 16, 20, 33])
def test_splits_are_joined_as_one_list(splits):
    results, sinks, cos, sin, batch_ids = case(splits)
    query = jnp.zeros((ROWS, HEADS, WIDTH), jnp.bfloat16)
    found = joining.join(
        [jnp.asarray(part) for part in results],
        jnp.asarray(sinks),
        jnp.asarray([1], jnp.int32),
        jnp.asarray(batch_ids),
        jnp.asarray(cos, jnp.float32),
        jnp.asarray(sin, jnp.float32),
        query,
        joining.Cut(heads=1, splits=splits, cuts=1),
        interpret=True,
    )
    found = np.asarray(found, np.float64)
    wanted = expected(results, sinks[1].astype(np.float64), cos, sin)
    assert not found[-1].any()
    # Two roundings to bfloat16: of the quotient and of its rotation.
    np.testing.assert_allclose(found[:-1], wanted[:-1], rtol=2.0**-7, atol=2.0**-7 * np.abs(wanted[:-1]).max())


def test_many_splits_are_asked_for_at_once(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("one split after the other")

    monkeypatch.setattr(joining, "_join_kernel", refuse)
    test_splits_are_joined_as_one_list(joining.MANY_SPLITS)
    with pytest.raises(AssertionError, match="one split after the other"):
        test_splits_are_joined_as_one_list(joining.MANY_SPLITS - 1)
