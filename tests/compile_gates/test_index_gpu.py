"""Every GPU index kernel becomes a code object of every target, fits its shared memory and spills nothing."""

import re

import pytest

from pallas_kernels.index_scores import triton as scores_triton
from tests.compile_gates import gpu
from tests.compile_gates.index_builds import gpu_builds, scorer_arguments

pytestmark = pytest.mark.skipif(gpu.unavailable() is not None, reason=str(gpu.unavailable()))

BUILDS = {build.name: build for build in gpu_builds()}


@pytest.mark.parametrize("target", gpu.TARGETS)
@pytest.mark.parametrize("name", BUILDS)
def test_kernel_compiles_within_the_target(name, target):
    build = BUILDS[name]
    for kernel in gpu.compile_for_gpu(build.function, build.arguments, target):
        assert kernel.shared_bytes <= gpu.SHARED_LIMIT[target]
        assert kernel.spills == 0, f"{kernel.name} spills {kernel.spills} bytes a thread"
        if "scores" in name:
            assert ("wgmma" if target == "sm_90" else "v_mfma") in kernel.assembly


@pytest.mark.parametrize(
    ("pages", "element", "offset"),
    [(130_000, "i8", "i32"), (140_000, "i16", "i32"), (262_143, "i16", "i32"), (300_000, "i8", "i64")],
    ids=["below 2 GiB", "above 2 GiB", "below 4 GiB", "above 4 GiB"],
)
def test_offsets_into_large_planes_do_not_overflow(pages, element, offset):
    arguments = scorer_arguments(64, 64, "fp8", pages=pages)
    kernel, *_ = gpu.triton_kernels(lambda *a: scores_triton.index_scores(*a, index_format="fp8"), arguments)
    signature = next(line for line in kernel.ir.splitlines() if "tt.func" in line)
    pointers = re.findall(r"!tt.ptr<(\w+)>", signature)
    assert pointers[5] == element
    assert ("xi64>" in kernel.ir) == (offset == "i64")
    # 32-bit offsets are signed.
    assert offset == "i64" or arguments[5].size // (2 if element == "i16" else 1) <= 2**31
