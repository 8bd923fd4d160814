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
# # A tour of one forward pass
#
# One prompt through every layer of a small model with random weights, with every intermediate in hand: streams, mixes,
# window keys, selections, experts. The layers are the ones that serve; they are only watched while they run.

# %%
import tempfile
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from checkpoints.synthesize import synthesize
from v41jax.comparison.bisect import bisect, tolerances
from v41jax.comparison.options import parse
from v41jax.comparison.subjects import open_subject
from v41jax.precision import Precision
from v41jax.presets import preset

directory = Path(tempfile.mkdtemp()) / "pico"
synthesize(directory, preset("pico"), seed=7, scopes=("text",))
exact = Precision(jnp.float32, activation_quantization=False)
model = open_subject(directory, parse("xla", exact), 128, 16)
text = model.config.text
ids = np.random.default_rng(1).integers(3, text.vocab_size - 1, 48).astype(np.int32)
run = model.observe(ids)

# %% [markdown]
# Twelve layers. The mode says what a layer owns: `full` layers compress tokens into entries and pick among them,
# `reindex` layers only pick anew, `reuse` layers read what the last source picked, `window` layers see nearby tokens
# only.

# %%
for layer in model.config.layers:
    owner = "" if layer.kv_owner is None else f"entries of layer {layer.kv_owner}, picked by layer {layer.topk_owner}"
    engram = "" if layer.engram is None else "Engram"
    print(f"{layer.index:3d} {layer.mode.value:8s} ratio {layer.ratio}  {owner:38s} {engram}")

# %% [markdown]
# Every token is a small bundle of residual streams. A layer reads one weighted sum of them and writes back to all of
# them; the weights (`pre_mix`) come from the sublayer before. Below: the size of each stream after each layer, and how
# much of each one the next layer reads, averaged over the prompt.

# %%
streams = np.stack([layer["streams"] for layer in run.layers])
mixes = np.stack([layer["pre_mix"] for layer in run.layers])
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
left.plot(np.sqrt((streams**2).mean(axis=(1, 3))))
left.set(xlabel="layer", ylabel="root mean square", title="streams")
right.imshow(mixes.mean(axis=1).T, aspect="auto", cmap="Blues", vmin=0)
right.set(xlabel="after layer", ylabel="stream", title="pre-mix")
plt.show()

# %% [markdown]
# The matrix that carries streams to streams is nearly doubly stochastic: twenty rounds of normalizing rows and
# columns.

# %%
matrix = run.layers[5]["attention_combination"][20]
print(np.round(matrix, 3))
print("rows add up to", np.round(matrix.sum(axis=1), 5), "columns to", np.round(matrix.sum(axis=0), 5))

# %% [markdown]
# Which experts each token chose in each layer (two of eight, and one that every token runs).

# %%
choices = np.stack([layer["router_choices"] for layer in run.layers])
load = np.stack([np.bincount(layer.ravel(), minlength=text.n_routed_experts) for layer in choices])
plt.figure(figsize=(5, 3))
plt.imshow(load.T, aspect="auto", cmap="Greens")
plt.colorbar(label="tokens")
plt.xlabel("layer")
plt.ylabel("expert")
plt.show()

# %% [markdown]
# At the end the streams are collapsed once more, normed, and multiplied with the head. And all of it agrees with the
# float64 reference, operation by operation, when every layer is fed the reference's input.

# %%
reference = open_subject(directory, parse("reference", exact), 128, 16)
expected = reference.observe(ids)
found = bisect(expected, model.observe(ids, expected), model.config, exact, tolerances(exact, exact))
worst = max((item for item in found.comparisons if item.values), key=lambda item: item.values.worst_row)
print(f"{len(found.comparisons)} tensors compared, {len(found.departures)} depart")
print(f"farthest: layer {worst.layer} {worst.operation}, a row differs by {worst.values.worst_row:.1e}")
assert not found.departures
