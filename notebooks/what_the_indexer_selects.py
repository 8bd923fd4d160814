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
# # What the indexer selects
#
# A query reads a window of nearby tokens and a few compressed entries from everything before. An *index source* scores
# all entries cheaply and keeps the best; layers after it reuse its list. One source also keeps whole *candidate
# blocks*, and later sources score only inside those. Here are the scores, the lists and the blocks of one prompt.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from checkpoints.load import Checkpoint
from checkpoints.synthesize import synthesize
from v41jax.presets import preset
from v41jax.reference import ReferenceModel

directory = Path(tempfile.mkdtemp()) / "pico"
synthesize(directory, preset("pico"), seed=7, scopes=("text",))
checkpoint = Checkpoint.open(directory, scopes=("text",))
model = ReferenceModel(checkpoint, activation_quantization=False)
text = model.config.text
ids = np.random.default_rng(2).integers(3, text.vocab_size - 1, 96)
layers = model.forward(ids).layers
sources = [layer for layer in layers if layer.index_scores is not None]
print(f"keep {text.index_topk} entries, {text.candidate_topk_blocks} blocks of {text.candidate_block_size}")

# %% [markdown]
# Scores of every source: a row is a query, a column an entry. An entry of a ratio-2 layer covers two tokens and exists
# once both are there, hence the different widths. Layers 8 and 10 see only the candidates of layer 6.

# %%
figure, axes = plt.subplots(1, len(sources), figsize=(11, 3.2))
for axis, layer in zip(axes, sources):
    scores = np.where(np.isfinite(layer.index_scores), layer.index_scores, np.nan)
    axis.imshow(scores, aspect="auto", cmap="coolwarm", interpolation="nearest")
    axis.set_title(f"layer {layer.layer}")
    axis.set_xlabel("entry")
axes[0].set_ylabel("query")
plt.show()

# %% [markdown]
# What they keep. While a query sees no more entries than may be kept, it keeps all of them; after that the choice
# bites.

# %%
figure, axes = plt.subplots(1, len(sources), figsize=(11, 3.2))
for axis, layer in zip(axes, sources):
    chosen = np.zeros(layer.index_scores.shape)
    for row, entries in enumerate(layer.topk):
        chosen[row, entries[entries >= 0]] = 1
    axis.imshow(chosen, aspect="auto", cmap="Blues", interpolation="nearest")
    axis.set_title(f"layer {layer.layer}")
    axis.set_xlabel("entry")
axes[0].set_ylabel("query")
plt.show()

# %% [markdown]
# Candidate blocks of layer 6. The newest block a query can see is always kept.

# %%
source = layers[text.candidate_source_layer_id]
blocks = np.zeros((len(ids), -(-len(ids) // text.candidate_block_size)))
for row, kept in enumerate(source.candidate_blocks):
    blocks[row, kept[kept >= 0]] = 1
    assert row // text.candidate_block_size in kept
plt.figure(figsize=(4, 3.2))
plt.imshow(blocks, aspect="auto", cmap="Oranges", interpolation="nearest")
plt.xlabel("block")
plt.ylabel("query")
plt.show()

# %% [markdown]
# How close is the decision? The margin is the score of the last entry kept less that of the first one dropped. Where
# it is near the noise of the arithmetic, two correct implementations may differ, and the comparison tool says so.

# %%
plt.figure(figsize=(6, 3))
for layer in sources:
    margins = []
    for scores, entries in zip(layer.index_scores, layer.topk):
        ordered = np.sort(scores[np.isfinite(scores)])[::-1]
        if len(ordered) > text.index_topk:
            margins.append(ordered[text.index_topk - 1] - ordered[text.index_topk])
            assert set(entries) >= set(np.flatnonzero(scores > ordered[text.index_topk - 1]))
    plt.plot(np.sort(margins), label=f"layer {layer.layer}")
plt.yscale("symlog", linthresh=1e-4)
plt.xlabel("queries, sorted")
plt.ylabel("margin")
plt.legend()
plt.show()

# %% [markdown]
# Scores of exactly zero are common: a score is a sum of rectified products, and all of an entry's heads may be
# negative. Such ties go to the smaller entry id.

# %%
for layer in sources:
    finite = layer.index_scores[np.isfinite(layer.index_scores)]
    print(f"layer {layer.layer}: {np.mean(finite == 0):.1%} of the scores are exactly zero")
model.close()
checkpoint.close()
