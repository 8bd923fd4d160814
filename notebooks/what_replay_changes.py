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
# # What replay changes
#
# After the first decoder layer has published its entries, nothing later reads a prompt row but through window rings.
# *Bounded replay* therefore runs the decoder on the last window of a prompt only, and rebuilds the encoder's windows
# after a prefix hit from one recomputed block. Both are approximations; here is what they leave out, and how far it
# moves the logits. The forwards are the float64 reference with every mask written out.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from checkpoints.load import Checkpoint
from checkpoints.synthesize import synthesize
from v41jax.presets import preset
from v41jax.reference import ReferenceModel
from v41jax.reference.replay_oracle import ReplayForward, ReplayOracle, reused_prefix

directory = Path(tempfile.mkdtemp()) / "pico"
synthesize(directory, preset("pico"), seed=7, scopes=("text",))
checkpoint = Checkpoint.open(directory, scopes=("text",))
model = ReferenceModel(checkpoint, activation_quantization=False)
oracle = ReplayOracle(model)
length, hit, block = 80, 64, 32
ids = np.random.default_rng(8).integers(3, 500, length + 1)
print(f"window {oracle.window}, decoder from layer {oracle.boundary} of {oracle.layers}")

# %% [markdown]
# Who sees whom in a window, for a cold prompt of 80 tokens: an encoder layer, a decoder layer under replay, and the
# last layer, of which one row is left.

# %%
tail = ReplayForward(0, 0, length, decoder_replay=True)
figure, axes = plt.subplots(1, 3, figsize=(10, 3.2))
for axis, layer in zip(axes, (0, oracle.boundary + 1, oracle.layers - 1)):
    axis.imshow(oracle.visibility(tail, layer).window > 0, cmap="Blues", interpolation="nearest")
    axis.set(title=f"layer {layer}", xlabel="position")
axes[0].set_ylabel("row")
plt.show()

# %% [markdown]
# After a hit of 64 tokens the rows 32..63 are recomputed: their windows begin at 32, so the first of them see too
# little, and their results are thrown away except for what they leave in the rings.

# %%
rebuild = ReplayForward(hit - block, hit, length, rebuild=True)
plt.figure(figsize=(6, 3))
plt.imshow(oracle.visibility(rebuild, 0).window > 0, aspect="auto", cmap="Blues", interpolation="nearest")
plt.axhline(block - 0.5, color="#b00020")
plt.yticks([0, block, length - hit + block - 1], [hit - block, hit, length - 1])
plt.xlabel("position")
plt.ylabel("row")
plt.show()

# %% [markdown]
# Rows each layer runs: the saving.

# %%
counts = [int(oracle.visibility(tail, layer).query_rows.sum()) for layer in range(oracle.layers)]
plt.figure(figsize=(6, 2.2))
plt.bar(range(oracle.layers), counts)
plt.xlabel("layer")
plt.ylabel("rows")
plt.show()
print(f"{sum(counts)} of {length * oracle.layers} rows x layers")

# %% [markdown]
# The distance: the last prompt row, and one token decoded on top of whatever each mode left in the rings.

# %%
ratios = dict(model.config.owners)
full = model.forward(ids[:length])
after = model.forward(ids[length:], state=full.state, record=False).logits[-1]


def decoded(state):
    """Logits of the next token on top of a state."""
    return model.forward(ids[length:], state=state, record=False).logits[-1]


prefix = reused_prefix(model.forward(ids[:hit], record=False).state, hit, ratios)
states = {
    "full": full,
    "decoder replay": oracle.forward(ids[:length], None, tail),
    "encoder replay": oracle.forward(ids[hit - block : length], prefix, rebuild),
    "both replays": oracle.forward(
        ids[hit - block : length], prefix, ReplayForward(hit - block, hit, length, rebuild=True, decoder_replay=True)
    ),
}
distances = {}
for name, output in states.items():
    last = np.linalg.norm(output.logits[-1] - full.logits[-1]) / np.linalg.norm(full.logits[-1])
    following = np.linalg.norm(decoded(output.state) - after) / np.linalg.norm(after)
    distances[name] = last, following
    print(f"{name:15s} last prompt row {last:.1e}, next token {following:.1e}")
assert distances["full"] == (0, 0)

# %%
figure, axis = plt.subplots(figsize=(6, 2.6))
names = [name for name in distances if name != "full"]
for offset, (label, index) in enumerate((("last prompt row", 0), ("next token", 1))):
    axis.bar(np.arange(len(names)) + 0.4 * offset, [distances[name][index] for name in names], 0.4, label=label)
axis.set_xticks(np.arange(len(names)) + 0.2, names)
axis.set_ylabel("relative L2")
axis.legend()
plt.show()

# %% [markdown]
# Random weights have no reason to forget what lies outside a window; the released ones were trained for this. The way
# to know is to measure: `v41jax compare --model DIR --replay`.

# %%
model.close()
checkpoint.close()
