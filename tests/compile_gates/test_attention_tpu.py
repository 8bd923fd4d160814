"""The TPU kernels of attention and the stored-weight products are legal on every generation, fit its VMEM, and neither
a pool nor a stack of weights is copied in front of them."""

import pytest

from tests.compile_gates import tpu
from tests.compile_gates.attention_builds import tpu_builds
from tests.compile_gates.index_builds import gated

pytestmark = pytest.mark.skipif(tpu.unavailable() is not None, reason=str(tpu.unavailable()))

BUILDS = {build.name: build for build in tpu_builds()}


@pytest.mark.parametrize(("name", "generation"), gated(BUILDS.values(), tpu.GENERATIONS))
def test_kernel_compiles_without_a_copy_of_stored_rows(name, generation):
    build = BUILDS[name]
    built = tpu.compile_for_tpu(build.function, build.arguments, generation)
    assert built.vmem_bytes
    assert all(0 < size <= tpu.VMEM_BYTES[generation] for size in built.vmem_bytes)
    for pool in build.pools:
        assert built.copies_of(pool) == []
