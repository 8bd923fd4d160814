"""Every GPU kernel on single rows becomes a code object of every target and keeps its row in registers."""

import pytest

from tests.compile_gates import gpu
from tests.compile_gates.row_builds import gpu_builds

pytestmark = pytest.mark.skipif(gpu.unavailable() is not None, reason=str(gpu.unavailable()))

BUILDS = {build.name: build for build in gpu_builds()}


@pytest.mark.parametrize("target", gpu.TARGETS)
@pytest.mark.parametrize("name", BUILDS)
def test_kernel_compiles_within_the_target(name, target):
    build = BUILDS[name]
    for kernel in gpu.compile_for_gpu(build.function, build.arguments, target):
        assert kernel.shared_bytes <= gpu.SHARED_LIMIT[target]
        assert kernel.spills == 0, f"{kernel.name} spills {kernel.spills} bytes a thread"
