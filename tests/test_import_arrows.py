"""The arrows between the parts, read off the import statements of every source file."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("v41jax", "pallas_kernels", "scheduler", "checkpoints")
DEVICE_LIBRARIES = ("jax", "jaxlib", "flax", "orbax")

# The arrays a forward reads and writes, and the sizes they have: data, not scheduling.
STEP_CONTRACT = ("scheduler.batch", "scheduler.pool_geometry", "scheduler.pools")
CHECKPOINT_NEEDS = (
    "checkpoints",
    "v41jax.config",
    "v41jax.presets",
    "v41jax.quantization_numpy",
    "v41jax.engram_primes",
)
LAYER_NEEDS = (
    "v41jax.layers",
    "v41jax.config",
    "v41jax.precision",
    "v41jax.quantization",
    "pallas_kernels",
    *STEP_CONTRACT,
)
# module prefix -> (prefixes of ours it may import, whether it may import device libraries)
RULES = {
    "scheduler.pools": (("scheduler.batch", "scheduler.pool_geometry"), True),
    "scheduler": (("scheduler",), False),
    "checkpoints.orbax_store": ((*CHECKPOINT_NEEDS, "v41jax.parameters", "v41jax.sharding"), True),
    "checkpoints": (CHECKPOINT_NEEDS, False),
    "pallas_kernels": (("pallas_kernels", "v41jax.quantization"), True),
    "v41jax.config": (("v41jax.config_rules", "v41jax.presets", "v41jax.engram_primes"), False),
    "v41jax.protocol": (("v41jax.protocol", "v41jax.tokenizer"), False),
    "v41jax.load": (("v41jax.load",), False),
    "v41jax.reference": (
        (
            "v41jax.reference",
            "v41jax.config",
            "v41jax.quantization_numpy",
            "v41jax.engram_hashing",
            "v41jax.engram_lookup",
            "v41jax.engram_primes",
            "v41jax.token_map",
            "scheduler.batch",
            "checkpoints",
        ),
        False,
    ),
    "v41jax.layers": (LAYER_NEEDS, True),
    "v41jax.step": ((*LAYER_NEEDS, "v41jax.bounded_replay"), True),
    "v41jax.attention_sublayer": ((*LAYER_NEEDS, "v41jax.parameters", "v41jax.flow", "v41jax.step"), True),
    "v41jax.model": (
        (
            *LAYER_NEEDS,
            "v41jax.parameters",
            "v41jax.flow",
            "v41jax.bounded_replay",
            "v41jax.slot_state",
            "v41jax.step",
            "v41jax.attention_sublayer",
        ),
        True,
    ),
    "v41jax.bounded_replay": (LAYER_NEEDS, True),
    "v41jax.draft_parameters": ((*LAYER_NEEDS, "v41jax.parameters"), True),
    "v41jax.dspark": (
        (*LAYER_NEEDS, "v41jax.parameters", "v41jax.draft_parameters", "v41jax.model", "v41jax.sampling"),
        True,
    ),
    "v41jax.verification": ((*STEP_CONTRACT, "v41jax.sampling"), True),
    "v41jax.confidence": ((), False),
}


def modules():
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT).with_suffix("")
            parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
            yield ".".join(parts), path


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@pytest.mark.parametrize("prefix", RULES)
def test_imports_follow_the_arrows(prefix):
    allowed, device = RULES[prefix]
    narrower = [other for other in RULES if other != prefix and within(other, (prefix,))]
    for module, path in modules():
        if not within(module, (prefix,)) or within(module, narrower):
            continue
        names = list(imports(path))
        for name in names:
            if within(name, DEVICE_LIBRARIES):
                assert device, f"{module} imports {name}"
            elif name.split(".")[0] in OURS:
                # `from scheduler import pages` names the package and then the module: the module decides.
                is_package_of_a_named_module = any(other.startswith(name + ".") for other in names)
                assert is_package_of_a_named_module or within(name, allowed), f"{module} imports {name}"
