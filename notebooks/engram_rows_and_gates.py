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
# # Engram rows and gates
#
# Two layers look up what the last two, three and four tokens are, in a table of many millions of rows, and add it to
# the streams through a gate. Which rows is decided by a hash of token ids alone, so that the host can fetch them
# before the forward begins.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from checkpoints.load import Checkpoint
from checkpoints.synthesize import synthesize
from scheduler.batch import DEAD
from v41jax.engram_hashing import EngramHasher
from v41jax.presets import preset
from v41jax.reference import ReferenceModel
from v41jax.token_map import load_token_map

directory = Path(tempfile.mkdtemp()) / "pico"
synthesize(directory, preset("pico"), seed=7, scopes=("text",))
checkpoint = Checkpoint.open(directory, scopes=("text",))
hasher = EngramHasher(checkpoint.config, load_token_map(directory, checkpoint.config))
text = checkpoint.config.text
print(f"Engram in layers {text.engram_layer_ids}, {hasher.columns} rows a token")
print("buckets of each column:", hasher.primes[0])

# %% [markdown]
# Several tokens share one compressed id (upper and lower case, accents). The hash sees compressed ids only. A repeated
# phrase reads the same rows again as soon as enough of it has been seen: two tokens for the first columns, four for
# the last ones.

# %%
random = np.random.default_rng(4)
phrase = random.integers(10, 500, 6)
ids = np.concatenate([random.integers(10, 500, 5), phrase, random.integers(10, 500, 4), phrase])
compressed = hasher.compress(ids)
rows = hasher.row_ids(np.concatenate([np.full(hasher.history_size, DEAD), compressed]))
first, second = rows[5:11, 0], rows[15:21, 0]
same = first == second
plt.figure(figsize=(4, 2.6))
plt.imshow(same, aspect="auto", cmap="Greens", vmin=0, vmax=1)
plt.xlabel("column (2-, 3-, 4-grams)")
plt.ylabel("token of the phrase")
plt.title("same row as the first time")
plt.show()
assert same[3:].all() and not same[0].any()

# %% [markdown]
# Image tokens are dead: they are never looked up, and the hash of a token does not reach back past one.

# %%
image = np.zeros(len(ids), bool)
image[12] = True
blocked = hasher.row_ids(np.concatenate([np.full(hasher.history_size, DEAD), hasher.compress(ids, image)]))
changed = (blocked != rows).any(axis=1)
print("tokens whose rows change when token 12 becomes an image:", np.flatnonzero(changed[:, :].any(axis=1)))

# %% [markdown]
# Inside the layer the rows become one key a stream and one value. A gate compares the key with the stream as it is,
# and the gated value is added. One gate a stream and token:

# %%
model = ReferenceModel(checkpoint, activation_quantization=False)
records = [layer for layer in model.forward(ids).layers if layer.engram_gates is not None]
figure, axes = plt.subplots(1, len(records), figsize=(9, 2.4))
for axis, record in zip(axes, records):
    shown = axis.imshow(record.engram_gates.T, aspect="auto", cmap="viridis", vmin=0, vmax=1)
    axis.set(title=f"layer {record.layer}", xlabel="token", ylabel="stream")
figure.colorbar(shown, ax=axes, label="gate")
plt.show()

# %%
for record in records:
    moved = np.linalg.norm(record.mixed_streams - record.input_streams, axis=2)
    size = np.linalg.norm(record.input_streams, axis=2)
    print(f"layer {record.layer}: the update is {np.mean(moved / size):.2f} of a stream's size")
    assert (record.engram_gates > 0).all() and (record.engram_gates < 1).all()
model.close()
checkpoint.close()
