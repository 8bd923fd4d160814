"""Score rows that are hard to select from: ties, both zeros, infinities, NaN, and poison past the bound."""

import numpy as np

KINDS = ("random", "few values", "all equal", "zeros of both signs", "infinities", "nan", "nothing but nan")


def score_rows(kind: str, rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """scores [rows, width] float32 with NaN past the bounds, visible [rows] int32 that includes 0 and `width`."""
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((rows, width)).astype(np.float32)
    if kind == "few values":
        scores = np.round(scores)
    elif kind == "all equal":
        scores[:] = -1.5
    elif kind == "zeros of both signs":
        scores = np.where(scores > 1, scores, np.where(rng.random(scores.shape) < 0.5, np.float32(0), np.float32(-0.0)))
    elif kind == "infinities":
        scores[rng.random(scores.shape) < 0.1] = np.inf
        scores[rng.random(scores.shape) < 0.1] = -np.inf
    elif kind == "nan":
        scores[rng.random(scores.shape) < 0.3] = np.nan
    elif kind == "nothing but nan":
        scores[:] = np.nan
    visible = rng.integers(0, width + 1, rows).astype(np.int32)
    visible[: min(rows, 2)] = [width, 0][: min(rows, 2)]
    scores[np.arange(width) >= visible[:, None]] = np.nan
    return scores, visible
