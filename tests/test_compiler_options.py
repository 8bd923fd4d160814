"""What a runner asks of XLA when it compiles a step."""

import logging
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import backend
from v41jax.compiled_steps import Lowered, compiled, compiler_options
from v41jax.layers.collectives import Parallel
from v41jax.model import unrolls_layers


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
        for phase, unrolled in (("decode", asked), ("prefill", False)):
            step = SimpleNamespace(phase=phase, setup=SimpleNamespace(parallel=parallel))
            assert unrolls_layers(step) == unrolled


def test_what_the_user_says_of_an_option_stands(monkeypatch):
    with backend.use_target(backend.Target("triton", "cuda")):
        asked = compiler_options(Parallel())
        monkeypatch.setenv("XLA_FLAGS", "--a --xla_gpu_command_buffer_scheduling_mode=SERIALIZE")
        left = compiler_options(Parallel())
    assert asked.keys() - left.keys() == {"xla_gpu_command_buffer_scheduling_mode"}


def lowered_with(options):
    return Lowered(jax.jit(lambda x: x + 1).lower(1), lambda *given: given, options)


@pytest.mark.parametrize(
    ("name", "value"), [("xla_gpu_of_another_version", True), ("xla_gpu_enable_command_buffer", "OF_ANOTHER_VERSION")]
)
def test_an_xla_without_an_option_compiles_without_it_and_says_so(caplog, name, value):
    with caplog.at_level(logging.WARNING):
        assert compiled(lowered_with({name: value})).call(1) == 2
    [warning] = caplog.messages
    assert f"without {name}" in warning


def test_other_faults_of_a_compilation_are_raised():
    class Program:
        def compile(self, options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compiled(Lowered(Program(), lambda *given: given, {"xla_gpu_graph_min_graph_size": 1}))


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
