"""Every GPU kernel of a row's small steps becomes one code object of every target and keeps its row in registers."""

import pytest

from pallas_kernels import backend
from tests.compile_gates import attention_builds, decode_builds, gpu, row_builds

pytestmark = pytest.mark.skipif(gpu.unavailable() is not None, reason=str(gpu.unavailable()))

BUILDS = {build.name: build for build in (*row_builds.gpu_builds(), *decode_builds.gpu_builds())}


@pytest.mark.parametrize("target", gpu.TARGETS)
@pytest.mark.parametrize("name", BUILDS)
def test_kernel_compiles_within_the_target(name, target):
    build = BUILDS[name]
    [kernel] = gpu.compile_for_gpu(build.function, build.arguments, target)
    assert kernel.shared_bytes <= gpu.SHARED_LIMIT[target]
    assert kernel.spills == 0, f"{kernel.name} spills {kernel.spills} bytes a thread"


def test_the_router_meets_no_barrier():
    """Its warp reduces with one instruction and shares nothing."""
    build = next(build for name, build in BUILDS.items() if name.startswith("route"))
    [kernel] = gpu.compile_for_gpu(build.function, build.arguments, "sm_90")
    assert "redux.sync" in kernel.assembly and "bar.sync" not in kernel.assembly and kernel.shared_bytes == 0


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
@pytest.mark.parametrize("name", ["gated_rows", "grouped_experts 1 rows", "grouped_experts 4096 rows"])
def test_the_clamps_of_swiglu_keep_nan(name, platform):
    """Triton's minima and maxima of floats take the operand that is a number."""
    builds = (*row_builds.gpu_builds(), *attention_builds.gpu_builds())
    build = next(build for build in builds if build.name.startswith(name))
    with backend.use_target(backend.Target("triton", platform)):
        kernels = gpu.triton_kernels(build.function, build.arguments, platform)
    text = "".join(kernel.ir for kernel in kernels)
    assert "math.exp" in text or "_exp" in text
    assert "minnum" not in text and "maxnum" not in text
