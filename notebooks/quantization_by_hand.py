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
# # Quantization formats by hand
#
# The released weights and activations use three number formats and a few ways to scale them. Everything here is done
# twice: by hand and by the codecs the model runs on.

# %%
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np

from v41jax import quantization_numpy as codecs

# %% [markdown]
# E2M1 has sixteen codes: a sign, and eight magnitudes. Two codes share a byte; the element with the even index is the
# low half.

# %%
magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
decoded = codecs.decode_e2m1(np.arange(16, dtype=np.uint8))
assert decoded[:8].tolist() == magnitudes and decoded[8:].tolist() == [-m for m in magnitudes]
packed = codecs.pack_nibbles(np.array([1, 2, 3, 4], np.uint8))
print("codes 1 2 3 4 packed:", [f"{byte:#04x}" for byte in packed])
assert codecs.unpack_nibbles(packed).tolist() == [1, 2, 3, 4]

# %% [markdown]
# E4M3 has 4 exponent and 3 mantissa bits, 448 at most; E8M0 is a bare power of two. The three element grids:

# %%
e4m3 = codecs.decode_e4m3(np.arange(256, dtype=np.uint8))
e4m3 = np.unique(e4m3[np.isfinite(e4m3) & (e4m3 > 0)])
figure, axis = plt.subplots(figsize=(9, 1.6))
axis.eventplot([e4m3, magnitudes[1:]], colors=["#2266aa", "#b00020"], lineoffsets=[1, 0], linelengths=0.7)
axis.set_xscale("log", base=2)
axis.set_yticks([0, 1], ["E2M1", "E4M3"])
plt.show()
print(f"E4M3 has {len(e4m3)} positive values from {e4m3[0]} to {e4m3[-1]}")

# %% [markdown]
# Q8 by hand: 32 values share a scale, the smallest power of two for which the largest value is at most 448.

# %%
x = np.random.default_rng(6).normal(size=32).astype(np.float32)
amax = np.abs(x).max()
scale = 2.0 ** np.ceil(np.log2(amax / 448))
steps = x / scale
exponent = np.maximum(np.floor(np.log2(np.abs(steps))), -6)
by_hand = np.round(steps / 2 ** (exponent - 3)) * 2 ** (exponent - 3) * scale
assert np.array_equal(by_hand.astype(np.float32), codecs.fake_q8(x))
print(f"largest {amax:.4f}, scale 2^{int(np.log2(scale))}, largest error {np.abs(by_hand - x).max():.4f}")

# %% [markdown]
# Q4m does the same with E2M1 and 6 (index keys and queries). Q4n has 16 values a block and an E4M3 scale (compressed
# rows): its scale may round down, and then the largest value is clipped.

# %%
block = np.zeros(16, np.float32)
block[0] = 100
codes, scales = codecs.quantize_q4n(block)
stored = codecs.decode_e4m3(scales)[0]
print(f"100 / 6 = {100 / 6:.3f}, stored as {stored}; 100 / {stored} = {100 / stored} is clipped to 6: {6 * stored}")
assert codecs.fake_q4n(block)[0] == 96

# %% [markdown]
# What each format does to a thousand normal values.

# %%
values = np.random.default_rng(7).normal(size=4096).astype(np.float32)
figure, axes = plt.subplots(1, 3, figsize=(10, 2.6), sharey=True)
for axis, (name, quantize) in zip(axes, (("Q8", codecs.fake_q8), ("Q4m", codecs.fake_q4m), ("Q4n", codecs.fake_q4n))):
    error = quantize(values) - values
    axis.scatter(values, error, s=1)
    axis.set(title=f"{name}: relative L2 {np.linalg.norm(error) / np.linalg.norm(values):.3f}", xlabel="value")
axes[0].set_ylabel("error")
plt.show()

# %% [markdown]
# A *rounding flip*: two results that agree to seven digits lie on different sides of a boundary, and what is read
# differs by a whole step. This is why a quantized model is compared layer by layer and its flips are named.

# %%
pair = np.tile(np.float32(3.0), (2, 32))
pair[:, 0] = 4.25
boundary = np.float32(4.25)
pair[0, 0], pair[1, 0] = boundary * (1 - 1e-7), boundary * (1 + 1e-7)
quantized = codecs.fake_q8(pair)[:, 0]
print(f"{pair[0, 0]:.7f} and {pair[1, 0]:.7f} are read as {quantized[0]} and {quantized[1]}")

# %% [markdown]
# All of these values are exact in bfloat16: at most six significant bits. Products of them are exact in float32, which
# is why implementations differ in the order of sums only.

# %%
for quantize in (codecs.fake_q8, codecs.fake_q4m, codecs.fake_q4n):
    result = quantize(values)
    assert np.array_equal(result.astype(ml_dtypes.bfloat16).astype(np.float32), result)
