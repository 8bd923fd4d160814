"""Every GPU kernel of attention and the stored-weight products becomes a code object that fits its target."""

import pytest

from pallas_kernels import backend
from tests.compile_gates import gpu
from tests.compile_gates.attention_builds import gpu_builds

pytestmark = pytest.mark.skipif(gpu.unavailable() is not None, reason=str(gpu.unavailable()))

BUILDS = {build.name: build for build in gpu_builds()}
SPILLS = 768
"""Bytes a thread may spill: a [64, 512] float32 accumulator takes half of all registers of 256 threads."""

ADDING = ("join", "activate", "blocks", "widen")
"""Parts of the names of kernels without a product."""
BY_WARPS = (
    *("sparse_attention bf16 1 rows", "sparse_attention packed 1 rows"),
    *(f"grouped_experts {rows} rows{order}" for rows in (1, 64) for order in ("", ", arranged")),
)
"""Builds for few rows: 16 heads a program or two warps, fewer than a warp group multiplies."""
GROUPED = ("pair_experts_hidden",)
"""Kernels of such builds with a warp group all the same."""


@pytest.mark.parametrize("target", gpu.TARGETS)
@pytest.mark.parametrize("name", BUILDS)
def test_kernel_compiles_within_the_target(name, target):
    build = BUILDS[name]
    with backend.use_target(backend.Target("triton", "cuda" if target == "sm_90" else "rocm")):
        # A function of its own: one traced for another target keeps what it was traced with.
        kernels = gpu.compile_for_gpu(lambda *arguments: build.function(*arguments), build.arguments, target)
    for kernel in kernels:
        assert kernel.shared_bytes <= gpu.SHARED_LIMIT[target]
        assert kernel.spills <= SPILLS, f"{kernel.name} spills {kernel.spills} bytes a thread"
    products = [kernel for kernel in kernels if not any(part in kernel.name for part in ADDING)]
    for kernel in products:
        cuda = "mma.sync" if name in BY_WARPS and kernel.name not in GROUPED else "wgmma"
        assert (cuda if target == "sm_90" else "v_mfma") in kernel.assembly
    if "experts" in name and target == "sm_90":
        assert "mul.rn.bf16x2" in products[0].assembly
