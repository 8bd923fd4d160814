"""Every TPU index kernel is legal on every generation, fits its VMEM, and no pool is copied in front of it."""

import pytest

from tests.compile_gates import tpu
from tests.compile_gates.index_builds import gated, tpu_builds

pytestmark = pytest.mark.skipif(tpu.unavailable() is not None, reason=str(tpu.unavailable()))

BUILDS = {build.name: build for build in tpu_builds()}


@pytest.mark.parametrize(("name", "generation"), gated(BUILDS.values(), tpu.GENERATIONS))
def test_kernel_compiles_without_a_copy_of_the_pool(name, generation):
    build = BUILDS[name]
    built = tpu.compile_for_tpu(build.function, build.arguments, generation, donate=build.donated)
    assert len(built.vmem_bytes) == 1 and 0 < built.vmem_bytes[0] <= tpu.VMEM_BYTES[generation]
    for pool in build.pools:
        assert built.copies_of(pool) == []
