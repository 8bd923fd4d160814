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
# # Reading a TPU plan
#
# `v41jax plan --preset v4.1-flash --topology v5p:4x4x4 --json` says how the released model would lie on 64 chips that
# nobody here owns: what a chip holds, what fits beside it, and the least time of a step. Nothing in a plan is a
# measurement. Weights, pools and bounds are arithmetic on shapes and the chip's data sheet (`v41jax/chips.py`);
# `steps` is what the TPU compiler said of the real programs, and is empty where none was compiled (`--steps none`).

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from scheduler.runtime_config import EngineConfig
from v41jax.chips import chip_of
from v41jax.layers.collectives import Parallel
from v41jax.plan import Planner
from v41jax.plan_compile import Topology
from v41jax.presets import preset

GIB = 2**30
plan = json.loads(Path("notebooks/data/plan-v5p-4x4x4.json").read_text())
search = plan["search"] or [plan]
short = {"data_model": "over all", "model": "over model", "intermediate": "cut"}


def label(one, separator=", "):
    """Chips on `data` x chips on `model`, and where the experts are."""
    return f"{one['mesh']['data']}x{one['mesh']['model']}{separator}{short[one['experts']]}"


print(plan["topology"], "with", plan["devices"], "devices;", plan["context"], "tokens a running request")
print("chosen:", label(plan))

# %% [markdown]
# ## What a chip holds
#
# Every mesh of 64 chips that `serve` accepts and that holds the weights, `data` x `model`, in the order of the tokens a
# second that its decode step allows. Routed experts are most of the weights: whole experts over *all* chips leave less
# than 7 GiB on each. Experts that are cut over the `model` chips are on every data shard again. What weights and a
# reserve leave of the chip becomes pools.

# %%
memory = [one["per_chip"]["memory_bytes"] / GIB for one in search]
weights = np.array([one["per_chip"]["weight_bytes"] / GIB for one in search])
pools = np.array([one["per_chip"]["pool_bytes"] / GIB for one in search])
figure, axis = plt.subplots(figsize=(10, 3.6))
places = np.arange(len(search))
axis.bar(places, weights, label="weights")
axis.bar(places, pools, bottom=weights, label="pools")
axis.bar(places, memory - weights - pools, bottom=weights + pools, label="left for temporaries", color="lightgrey")
axis.axhline(memory[0], color="black", linewidth=1)
axis.set_xticks(places, [label(one, "\n") for one in search], fontsize=8)
axis.set(ylabel="GiB a chip", ylim=(0, memory[0] * 1.2))
axis.legend(ncols=3, loc="upper right")
plt.show()
for one in plan["refused"]:
    print(f"refused: {one['mesh']}: {one['reason'][:90]}...")

# %% [markdown]
# Replicas have a price: pages live on one data shard, and its `model` chips all hold them. More data shards therefore
# hold more different pages, although each chip has less memory for them.

# %%
config = preset("v4.1-flash")
engine = EngineConfig()
size, context = Topology(plan["devices"], plan["hosts"]), plan["context"]
block = Planner(config, engine, plan["topology"], size, context).setup(Parallel(1, 1)).geometry.block_size
for one in search:
    tokens = one["pages"] * block
    print(
        f"{label(one):16} {one['pages']:>11,} pages = {tokens / 1e6:7,.0f} M tokens, "
        f"{tokens / one['requests'] / 1e3:9,.0f} K for each of {one['requests']} requests"
    )
one = plan
whole, paged = one["per_chip"]["pool_bytes"] / GIB, one["pages_per_shard"] * one["page_bytes"] / GIB
print(f"the chosen mesh: {one['pages_per_shard']:,} pages of {one['page_bytes']:,} B = {paged:.2f} GiB")
print(f"of the {whole:.2f} GiB of pools; the rest are slots of {one['state_bytes']:,} B")

# %% [markdown]
# ## Bounds by term
#
# A decode step must read weights (of the experts those that some row chooses) and the rows that attention and the
# indexers look at; it must multiply; it must send. Each divided by what the chip can do is a time, and the step takes
# at least the longest. At this many requests it is memory on every mesh: an expert that is read serves few rows.

# %%
terms = ("memory", "compute", "interconnect")
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), gridspec_kw={"width_ratios": (3, 2)})
for offset, term in enumerate(terms):
    left.bar(places + (offset - 1) * 0.27, [one["decode_bound_s"][term] * 1e3 for one in search], 0.27, label=term)
left.set_xticks(places, [label(one, "\n") for one in search], fontsize=6)
left.set(ylabel="least ms of a decode step", yscale="log", ylim=(0.1, 60))
left.legend(ncols=3)
right.barh(places[::-1], [one["decode_tokens_per_second_bound"] / 1e3 for one in search])
right.set_yticks(places[::-1], [label(one) for one in search], fontsize=8)
right.set(xlabel="thousand tokens a second at most")
figure.tight_layout()
plt.show()
chip = chip_of(plan["topology"])
read = plan["decode_bound_s"]["memory"] * chip.memory_rate
print(f"read by one chip in a step: {read / GIB:.2f} GiB, at {chip.memory_rate / 1e9:,.0f} GB/s")
held = plan["per_chip"]["weight_bytes"] / GIB
print(f"at most {held:.2f} GiB of it are weights, all that the chip holds; the rest is pool rows")

# %% [markdown]
# ## What the compiler says
#
# A compiled step adds what arithmetic cannot know: how large the arguments are as the chip lays them out, what the
# program needs beside them, and every collective that is really in it. `fits` is whether the three together are below
# the chip's memory. The bound of a compiled step takes what its program sends, which may be more than the count that
# ranks the meshes. A plan that was made with `--steps none` has none of this.


# %%
def show_steps(steps, memory_bytes):
    """Memory of every compiled step, and what its collectives move."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2))
    base = np.zeros(len(steps))
    for part in ("argument_bytes", "temporary_bytes", "output_bytes"):
        sizes = np.array([step[part] / GIB for step in steps])
        left.bar(range(len(steps)), sizes, bottom=base, label=part.removesuffix("_bytes"))
        base = base + sizes
    left.axhline(memory_bytes / GIB, color="black", linewidth=1)
    left.set_xticks(range(len(steps)), [step["step"] for step in steps])
    left.set(ylabel="GiB a chip")
    kinds = sorted({one["kind"] for step in steps for one in step["collectives"]})
    for number, step in enumerate(steps):
        used = step["collectives"]
        moved = [sum(one["count"] * one["bytes"] for one in used if one["kind"] == kind) for kind in kinds]
        right.bar(np.arange(len(kinds)) + 0.25 * number, np.array(moved) / 2**20, 0.25, label=step["step"])
    right.set_xticks(range(len(kinds)), kinds, fontsize=8)
    right.set(ylabel="MiB of collectives")
    left.legend()
    right.legend()
    figure.tight_layout()
    plt.show()
    for step in steps:
        bound = step["bound_s"]
        least = bound[bound["dominant"]] * 1e3
        print(f"{step['step']}: {step['rows_per_shard']} rows a shard, {'fits' if step['fits'] else 'DOES NOT FIT'}")
        print(f"  {step['sent_bytes'] / 2**20:.1f} MiB sent, at least {least:.2f} ms by {bound['dominant']}")
        for one in step["collectives"]:
            print(f"  {one['count']:>4} x {one['kind']} of {one['bytes']:,} B over {one['group']} chips")


if plan["steps"]:
    show_steps(plan["steps"], plan["per_chip"]["memory_bytes"])
else:
    print("this plan holds no compiled step: what follows from it is arithmetic alone")

# %% [markdown]
# ## Asking again
#
# Sizes and bounds need neither a TPU nor its compiler, so questions are cheap. How many requests until a step is no
# longer bound by reading? More rows share the experts that are read, so the time to read hardly grows at first, while
# the other two grow with every row.

# %%
counts = [64, 128, 256, 512, 1024, 2048, 4096]
figure, axes = plt.subplots(1, 2, figsize=(10, 3.4))
for topology in ("v5p:4x4x4", "v6e:8x8"):
    asked = []
    for count in counts:
        planner = Planner(config, EngineConfig(max_num_seqs=count), topology, size, context)
        asked.append(planner.plan(Parallel(8, 8, "data_model")))
    axes[0].plot(counts, [one.tokens_per_second / 1e3 for one in asked], "o-", label=topology)
    if topology == plan["topology"]:
        for term in terms:
            axes[1].plot(counts, [getattr(one.decode, term) * 1e3 for one in asked], "o-", label=term)
axes[0].set(xscale="log", yscale="log", xlabel="running requests", ylabel="thousand tokens a second at most")
axes[1].set(xscale="log", yscale="log", xlabel="running requests", ylabel=f"least ms of a step, {plan['topology']}")
for axis in axes:
    axis.legend()
figure.tight_layout()
plt.show()
