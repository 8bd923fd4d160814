"""Every TPU index kernel is legal on every generation, fits its VMEM, and no pool is copied in front of it."""

import pytest

from tests.compile_gates import tpu
from tests.compile_gates.index_builds import tpu_builds

pytestmark = pytest.mark.skipif(tpu.unavailable() is not None, reason=str(tpu.unavailable()))

BUILDS = {build.name: build for build in tpu_builds()}
VMEM_BYTES = {"v5e": 128 * 2**20, "v5p": 128 * 2**20, "v6e": 128 * 2**20, "tpu7x": 64 * 2**20}


@pytest.mark.parametrize("generation", tpu.GENERATIONS)
@pytest.mark.parametrize("name", BUILDS)
def test_kernel_compiles_without_a_copy_of_the_pool(name, generation):
    build = BUILDS[name]
    built = tpu.compile_for_tpu(build.function, build.arguments, generation, donate=build.donated)
    assert len(built.vmem_bytes) == 1 and 0 < built.vmem_bytes[0] <= VMEM_BYTES[generation]
    for pool in build.pools:
        assert built.copies_of(pool) == []
