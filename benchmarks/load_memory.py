"""Peak host memory of loading a checkpoint into JAX arrays on the CPU. One JSON line on standard output.

    python -m benchmarks.load_memory --gigabytes 2
    python -m benchmarks.load_memory --gigabytes 4 --mesh data=2,model=4 --allowed-mb 1024

Synthesizes a checkpoint of that size (or takes `--model DIR`), loads its text weights as stored, maps its Engram
tables, and compares the peak with the bytes of the weights that stay. Exits with 1 when more than `--allowed-mb` was
needed on top. With `--mesh` the weights are cut over that many virtual devices, whole experts over all of them, and the
peak is compared with the bytes of the checkpoint: devices that hold replicas may need more than one of each weight.
Linux only: the peak is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.provenance import provenance
from checkpoints.engram_tables import EngramTables
from checkpoints.load import Checkpoint
from checkpoints.schema import tensor_schema
from checkpoints.synthesize import synthesize
from v41jax.commands.engine_options import parse_mesh
from v41jax.config import ModelConfig
from v41jax.mesh_runner import load_on_mesh
from v41jax.parameters import load_parameters
from v41jax.presets import preset_dict
from v41jax.sharding import arrangement, check_mesh, make_mesh

MEBIBYTE = 2**20


def peak_bytes() -> int:
    """Largest resident size of this process since `reset_peak`, file pages included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this benchmark needs Linux")


def reset_peak() -> int:
    """Starts a new peak at the present resident size and returns it, bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def config_of_size(nbytes: int) -> ModelConfig:
    """`bench-small` with as many times eight experts as make the checkpoint at least `nbytes` large."""
    root = preset_dict("bench-small")

    def sized(experts: int) -> ModelConfig:
        root["text_config"]["n_routed_experts"] = experts
        return ModelConfig.from_dict(root)

    def size(config: ModelConfig) -> int:
        return sum(spec.nbytes for spec in tensor_schema(config).values())

    few, more = size(sized(2)), size(sized(3))
    experts = max(2, 2 - (few - nbytes) // (more - few))
    return sized(-(-experts // 8) * 8)  # whole experts divide among eight devices


def measure(directory: Path, mesh: dict[str, int] | None = None) -> dict[str, object]:
    """Loads the text weights of a directory, on one device or cut over a mesh, and reports bytes and seconds."""
    jax.device_put(0.0).block_until_ready()
    on_disk = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    before = reset_peak()
    start = time.perf_counter()
    with Checkpoint.open(directory) as checkpoint:
        if mesh is None:
            parameters = jax.block_until_ready(load_parameters(checkpoint, max_model_len=4096))
        else:
            parallel = arrangement(mesh, whole_experts=True)
            check_mesh(checkpoint.config, parallel)
            place = make_mesh(parallel)
            parameters = jax.block_until_ready(
                load_on_mesh(checkpoint, place, parallel, max_model_len=4096, form="stored", dtype=jnp.bfloat16)
            )
        tables = EngramTables.open(checkpoint)
    seconds = time.perf_counter() - start
    growth = peak_bytes() - before
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(parameters))
    on_devices = sum(shard.data.nbytes for leaf in jax.tree.leaves(parameters) for shard in leaf.addressable_shards)
    tables.close()
    allowed_for = kept if mesh is None else on_disk
    return {
        "mesh": mesh,
        "checkpoint_bytes": on_disk,
        "kept_bytes": kept,
        "device_bytes": on_devices,
        "peak_growth_bytes": growth,
        "overhead_mb": round((growth - allowed_for) / MEBIBYTE, 1),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Parses the arguments, measures once, prints one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the synthesized checkpoint, 1e9 bytes")
    parser.add_argument("--model", type=Path, help="an existing checkpoint directory instead")
    parser.add_argument("--mesh", type=parse_mesh, help="data=D,model=M: cut over that many virtual devices")
    parser.add_argument("--allowed-mb", type=float, default=512.0, help="memory allowed on top, MiB")
    arguments = parser.parse_args()
    if arguments.mesh:
        jax.config.update("jax_num_cpu_devices", math.prod(arguments.mesh.values()))
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.model
        if directory is None:
            directory = Path(scratch) / "model"
            synthesize(directory, config_of_size(int(arguments.gigabytes * 1e9)))
        result = measure(directory, arguments.mesh)
    print(json.dumps({"benchmark": "load_memory", **result, "allowed_mb": arguments.allowed_mb, **provenance()}))
    if float(str(result["overhead_mb"])) > arguments.allowed_mb:
        sys.exit(1)


if __name__ == "__main__":
    main()
