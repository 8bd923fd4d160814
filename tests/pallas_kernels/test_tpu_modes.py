"""The simulation that the TPU kernels' tests rely on sees a race where there is one."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import backend
from tests.pallas_kernels.tpu_modes import interpretation


def copied(x, interpret, waits):
    pltpu = backend.tpu()

    def kernel(source, out, buffer, semaphore):
        copy = pltpu.make_async_copy(source, buffer, semaphore)
        copy.start()
        if waits:
            copy.wait()
        out[...] = buffer[...]
        if not waits:
            copy.wait()

    return backend.tpu_call(
        kernel,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(1,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.HBM)],
        out_specs=pl.BlockSpec(x.shape, lambda step: (0, 0)),
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=interpret,
        name="copied",
    )(x)


def test_a_read_that_does_not_wait_for_its_copy_fails():
    with interpretation("simulated") as interpret:
        jax.block_until_ready(copied(jnp.ones((8, 128)), interpret, waits=True))
    with pytest.raises(AssertionError, match="saw a race"), interpretation("simulated") as interpret:
        jax.block_until_ready(copied(jnp.ones((8, 128)), interpret, waits=False))


def test_a_simulation_that_did_not_run_fails():
    with pytest.raises(AssertionError, match="nothing was simulated"), interpretation("simulated"):
        pass
