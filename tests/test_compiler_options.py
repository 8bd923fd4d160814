"""What a runner asks of XLA when it compiles a step."""

import jax
import pytest

from pallas_kernels import backend
from v41jax.compiled_steps import compiler_options
from v41jax.layers.collectives import Parallel


@pytest.mark.parametrize(
    ("target", "parallel", "asked"),
    [
        (("triton", "cuda"), Parallel(), True),
        (("triton", "cuda"), Parallel(model=2), False),
        (("triton", "rocm"), Parallel(), False),
        (("triton", "cuda", True), Parallel(), False),
        (("tpu", "v5p"), Parallel(), False),
    ],
)
def test_kernels_run_side_by_side_on_one_nvidia_gpu(target, parallel, asked):
    with backend.use_target(backend.Target(*target)):
        assert bool(compiler_options(parallel)) == asked


def test_a_cpu_is_asked_for_nothing():
    assert compiler_options(Parallel()) == {}


def test_this_xla_knows_the_options():
    with backend.use_target(backend.Target("triton", "cuda")):
        options = compiler_options(Parallel())
    assert jax.jit(lambda x: x + 1).lower(1).compile(options)(1) == 2
    for name in options:
        with pytest.raises(Exception, match="no_such"):
            jax.jit(lambda x: x + 1).lower(1).compile({name: "no_such"})
        with pytest.raises(Exception, match="No such compile option"):
            jax.jit(lambda x: x + 1).lower(1).compile({name + "_at_all": "no_such"})
