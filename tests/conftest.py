"""Process-wide test settings: CPU only, one compilation cache for the whole run."""

import os
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Small float64 products: a second BLAS thread costs ten times the work it saves, and workers share the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile(
    "v41jax", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("v41jax")


def pytest_addoption(parser):
    group = parser.getgroup("v41jax")
    group.addoption("--histories", type=int, default=None, help="random serving histories to play on the real model")
    group.addoption("--seed", type=int, default=None, help="seed of the first one")
    group.addoption(
        "--every-prompt", action="store_true", help="trace all quantized golden prompts, not the short ones"
    )
