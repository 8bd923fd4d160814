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
# # The life of a page and a slot
#
# A *page* holds the compressed memory of some tokens and may be shared by every request with the same prefix. A *slot*
# holds what one running request cannot rebuild from its pages: window rings, half-finished pairs, the last Engram ids.
# This is the real scheduler, driven by hand; tokens are made up, no model runs.

# %%
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap

from scheduler.model_view import ModelView
from scheduler.runtime_config import EngineConfig
from scheduler.scheduled_batch import StepResult
from scheduler.scheduler import Scheduler
from scheduler.sequence import SamplingParams, Sequence
from v41jax.presets import preset

PAGES, SLOTS = 20, 3
view = ModelView.from_config(preset("pico"))
config = EngineConfig(
    kv_cache_block_size=32, max_num_seqs=SLOTS, max_num_batched_tokens=96, max_model_len=256, num_pages=PAGES
)
geometry = config.geometry(view)
scheduler = Scheduler(config, view, geometry, PAGES, SLOTS)
print(
    f"a page: {geometry.block_size} tokens; a slot: a ring of {geometry.ring} rows for each of {geometry.layers} layers"
)

# %% [markdown]
# Five requests. Three of them (`a`, `b` and `d`) begin with the same 64 tokens, two pages; `e` is
# cancelled while it decodes.

# %%
random = np.random.default_rng(3)
prefix = random.integers(12, 490, 64)
prompts = {
    "a": np.concatenate([prefix, random.integers(12, 490, 30)]),
    "b": np.concatenate([prefix, random.integers(12, 490, 9)]),
    "c": random.integers(12, 490, 120),
    "d": np.concatenate([prefix, random.integers(12, 490, 20)]),
    "e": random.integers(12, 490, 70),
}
arrivals = {"a": 0, "b": 3, "c": 3, "d": 14, "e": 16}
VACANT, CACHED, USED = range(3)
history, slots, log = [], [], []
for step in range(40):
    for name, prompt in prompts.items():
        if arrivals[name] == step:
            sampling = SamplingParams(max_tokens=12, ignore_eos=True)
            scheduler.add(Sequence(name, prompt.astype(np.int32), sampling))
    if step == 22:
        scheduler.abort("e")
    batch = scheduler.schedule()
    pool = scheduler.manager.pool
    state = np.full(PAGES, USED)
    state[list(pool.vacant_pages())] = VACANT
    state[list(pool.cached_pages())] = CACHED
    history.append(np.where(np.array(pool.refs) > 1, 3, state))
    owners = [""] * SLOTS
    for sequence in scheduler.running:
        owners[sequence.slot] = str(sequence.request_id)
    slots.append(owners)
    if batch is None:
        outputs = scheduler.take_outputs()
    else:
        rows = {name: f"{start}..{end}" for name, start, end in zip(batch.request_ids, batch.starts, batch.ends)}
        log.append(f"step {step:2d} {batch.phase.value:7s} {rows}")
        tokens = random.integers(12, 490, int(batch.is_final.sum())).astype(np.int32)
        outputs = scheduler.postprocess(batch, StepResult(tokens))
    for output in outputs:
        if output.finished:
            log.append(f"        {output.request_id} {output.finish_reason}, {output.cached_tokens} tokens reused")
print("\n".join(log))

# %% [markdown]
# Pages over time. A page is taken when a request needs it, *published* under the hash of its content once it is full
# and computed, shared (dark) while several requests name it, and kept as cached when nobody does, until its room is
# needed.

# %%
colours = ListedColormap(["#f2f2f2", "#f4d58d", "#5fa8d3", "#1b4965"])
plt.figure(figsize=(9, 3.6))
plt.imshow(np.array(history).T, aspect="auto", cmap=colours, vmin=0, vmax=3)
bar = plt.colorbar(ticks=[0.4, 1.1, 1.9, 2.6])
bar.ax.set_yticklabels(["vacant", "cached", "used", "shared"])
plt.xlabel("step")
plt.ylabel("page")
plt.show()

# %% [markdown]
# Slots over time: a request keeps its slot from admission to its end, then another one takes it and resets it.

# %%
names = ["", *prompts]
table = np.array([[names.index(owner) for owner in row] for row in slots]).T
plt.figure(figsize=(9, 1.6))
plt.imshow(table, aspect="auto", cmap="tab10", vmin=0, vmax=9, alpha=0.7)
for slot, row in enumerate(table):
    for step in np.flatnonzero(np.diff(row, prepend=0) * (row > 0)):
        plt.text(step, slot, names[row[step]], va="center")
plt.xlabel("step")
plt.ylabel("slot")
plt.yticks(range(SLOTS))
plt.show()

# %% [markdown]
# At the end nothing is held: every page is vacant or cached, and every slot is free.

# %%
assert not scheduler.has_work
assert pool.num_vacant + pool.num_cached == PAGES
print(f"{pool.num_cached} pages cached, {pool.num_vacant} vacant, slots {scheduler.manager.slots.free_slots()} free")
