"""Process-wide test settings: CPU only, one compilation cache for the whole run, quick compilation, bounded memory."""

import ctypes
import gc
import os
import sys
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE / "jax"))
# Low enough for operations that run one by one: workers, files and processes that tests start compile the same ones.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.02")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Programs of tests run for milliseconds and compile for seconds: machine code is not optimized. What XLA fuses, how it
# rounds and what it copies stay as they are; tests/compile_gates, whose subject is the compiled code, turn it back on.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Small float64 products: a second BLAS thread costs ten times the work it saves, and workers share the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

CACHED_BYTES = 2 << 30
"""Resident memory of a test process from which on it forgets traced and compiled functions between two modules."""

LONGEST = (
    "acceptance/test_speculation.py",
    "mesh/test_shards.py",
    "mesh/test_meshes.py",
    "compile_gates/test_attention_gpu.py",
    "compile_gates/test_index_tpu.py",
    "docs/test_commands.py",
    "comparison/test_sides.py",
    "comparison/test_ledger.py",
    "pallas_kernels/test_arranged_experts.py",
    "acceptance/test_execution_modes.py",
    "pallas_kernels/test_grouped_experts.py",
)
"""Files of a minute of work and more, longest first. A file is one worker's: a long one at the end leaves the others
idle, and xdist's own order, that of the number of tests, puts those with few slow tests there."""

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


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    if missing := [str(path) for path in places if not path.exists()]:
        raise pytest.UsageError(f"LONGEST names {', '.join(missing)}, which is not there")
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish():
    """Full collections of cyclic garbage walk what tracing keeps: not what was imported as well, and less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], 100)


@pytest.fixture(scope="module", autouse=True)
def bounded_caches():
    """JAX keeps every program of every module; another module uses none of the large ones."""
    yield
    if psutil.Process().memory_info().rss > CACHED_BYTES:
        jax.clear_caches()
        gc.collect()
        # What glibc keeps of the freed memory would count as resident, and the next modules' programs would go too.
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module", autouse=True)
def optimized_gates(request):
    """Compile gates judge the code that is served."""
    if "compile_gates" not in request.path.parts:
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
