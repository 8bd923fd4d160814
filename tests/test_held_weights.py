"""Which engines load the experts' codes arranged."""

import contextlib

import pytest

from pallas_kernels import backend
from scheduler.runtime_config import EngineConfig
from v41jax.held_weights import arranges_experts
from v41jax.presets import preset

CUDA, ROCM = backend.Target("triton", "cuda"), backend.Target("triton", "rocm")


@pytest.mark.parametrize(
    ("target", "options", "on_mesh", "arranges"),
    [
        (CUDA, {}, False, True),
        (CUDA, {"kernels": "pallas"}, False, True),
        (ROCM, {}, False, False),
        (CUDA, {"kernels": "xla"}, False, False),
        (CUDA, {"dtype": "float32"}, False, False),
        (CUDA, {}, True, False),
        (backend.Target("tpu", "v6e"), {}, False, False),
        (None, {}, False, False),
    ],
)
def test_experts_are_arranged_where_the_kernel_of_one_nvidia_gpu_reads_them(target, options, on_mesh, arranges):
    config = EngineConfig(**{"dtype": "bfloat16", **options})
    with contextlib.nullcontext() if target is None else backend.use_target(target):
        assert arranges_experts(config, preset("v4.1-flash").text, on_mesh=on_mesh) == arranges
