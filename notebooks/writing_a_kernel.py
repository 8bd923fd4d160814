# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     name: python3
#     display_name: Python 3
# ---

# %% [markdown]
# # Writing a new kernel and proving it
#
# Every operation here is a folder: a public call with its contract, a plain definition, and kernels that must agree
# with it. This is the way from a definition to a kernel, with the smallest operation of the model: the weighted sum of
# the residual streams.

# %%
import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.experimental import pallas as pl

from v41jax.layers.hyper_connections import collapse

# %% [markdown]
# **1. The definition.** It exists: `collapse(streams [N, S, D], pre_mix [N, S]) -> [N, D]`, a float32 sum that is
# rounded once. Whatever the kernel does, this is what it means.
#
# **2. The kernel.** A block of rows at a time. What is computed is a function of values; how blocks come and go is the
# call around it.

# %%
ROWS = 8


def weighted_sum(streams, weights):
    """[R, S, D] and [R, S] float32 -> [R, D] float32, streams added in ascending order."""
    total = streams[:, 0] * weights[:, :1]
    for stream in range(1, streams.shape[1]):
        total += streams[:, stream] * weights[:, stream : stream + 1]
    return total


def kernel(streams_ref, weights_ref, out_ref):
    """One block of rows."""
    out = weighted_sum(streams_ref[...].astype(jnp.float32), weights_ref[...])
    out_ref[...] = out.astype(out_ref.dtype)


@functools.partial(jax.jit, static_argnames="interpret")
def collapse_kernel(streams, pre_mix, *, interpret):
    """`collapse` by a Pallas kernel; rows are padded to whole blocks."""
    count, width, size = streams.shape
    padded = -(-count // ROWS) * ROWS
    grow = ((0, padded - count), (0, 0))
    out = pl.pallas_call(
        kernel,
        grid=(padded // ROWS,),
        in_specs=[
            pl.BlockSpec((ROWS, width, size), lambda row: (row, 0, 0)),
            pl.BlockSpec((ROWS, width), lambda row: (row, 0)),
        ],
        out_specs=pl.BlockSpec((ROWS, size), lambda row: (row, 0)),
        out_shape=jax.ShapeDtypeStruct((padded, size), streams.dtype),
        interpret=interpret,
    )(jnp.pad(streams, (*grow, (0, 0)), constant_values=jnp.nan), jnp.pad(pre_mix, grow))
    return out[:count]


# %% [markdown]
# **3. The proof of meaning.** One test over shapes, in interpret mode, memory that nobody may read filled with NaN:
# above, the padding rows are NaN, and none of it may show. The exact sum in float64 tells how much of the difference
# is rounding.

# %%
random = np.random.default_rng(9)
for rows in (1, 7, 8, 33):
    for dtype in (jnp.float32, jnp.bfloat16):
        streams = jnp.asarray(random.normal(size=(rows, 4, 256)), dtype)
        weights = jnp.asarray(random.uniform(size=(rows, 4)), jnp.float32)
        got = np.asarray(collapse_kernel(streams, weights, interpret=True), np.float64)
        wanted = np.asarray(collapse(streams, weights), np.float64)
        exact = np.einsum("nsd,ns->nd", np.asarray(streams, np.float64), np.asarray(weights, np.float64))
        unit = float(jnp.finfo(dtype).eps) * np.maximum(np.abs(exact), np.abs(exact).mean())
        assert got.shape == wanted.shape and np.isfinite(got).all()
        assert (np.abs(got - exact) <= 2 * unit).all()
        off, units = np.abs(got - wanted).max(), (np.abs(got - exact) / unit).max()
        print(f"{rows:3d} rows {jnp.dtype(dtype).name:8s} from the definition {off:.1e}, from the sum {units:.2f} eps")

# %% [markdown]
# **4. The proof that the proof can fail.** Plant a fault and see the test find it.

# %%
swapped = np.asarray(collapse_kernel(streams, weights[:, ::-1], interpret=True), np.float64)
wrong = (np.abs(swapped - exact) > 2 * unit).mean()
print(f"with the weights in the wrong order {wrong:.0%} of the values are out of bounds")
assert wrong > 0.5
plt.figure(figsize=(6, 2.6))
plt.hist(np.log10(np.abs(got - exact).ravel() + 1e-12), bins=40, alpha=0.7, label="kernel")
plt.hist(np.log10(np.abs(swapped - exact).ravel() + 1e-12), bins=40, alpha=0.7, label="planted fault")
plt.xlabel("log10 of the difference to the exact sum")
plt.legend()
plt.show()

# %% [markdown]
# **5. The proof of legality.** Interpret mode accepts what hardware refuses. Lowering for a TPU needs no TPU and runs
# Mosaic's checks of shapes, layouts and operations.

# %%
shapes = (jax.ShapeDtypeStruct((64, 4, 256), jnp.bfloat16), jax.ShapeDtypeStruct((64, 4), jnp.float32))
exported = jax.export.export(collapse_kernel, platforms=["tpu"])(*shapes, interpret=False)
module = exported.mlir_module()
print("lowered for", exported.platforms, "with", module.count("tpu_custom_call"), "Mosaic calls")
assert "tpu_custom_call" in module

# %% [markdown]
# **6. Speed** is only what a device says: `benchmarks/kernels.py` times every shape against its bound, and a kernel
# that is not faster than the definition is not chosen. A new operation is then a folder in `pallas_kernels/` with this
# test beside it; see [adding an operation](../adding_an_operation.md).
