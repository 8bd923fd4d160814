"""States that a phase goes on from, and snapshots that a later phase starts from."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from training.optimizer import start, update
from training.states import SNAPSHOT_BYTES, States, load_snapshot, save_snapshot, snapshot_step

MASTERS = {
    "layers.0.attn.wkv.weight": jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(3, 4),
    "layers.0.ffn.gate.bias": jnp.zeros(2, jnp.float32),
}


def test_a_restored_state_takes_the_step_that_the_saved_one_would_have_taken(tmp_path: Path) -> None:
    gradients = {name: jnp.full_like(master, 0.25) for name, master in MASTERS.items()}
    state = update(start(MASTERS, 3), gradients, jnp.float32(1e-2))
    states = States(tmp_path / "target")
    assert states.newest(state) is None
    states.save(state)
    states.close()
    again = States(tmp_path / "target")
    restored = again.newest(start(MASTERS, 0))
    again.close()
    assert int(restored.step) == 1
    made, expected = (update(each, gradients, jnp.float32(1e-2)) for each in (restored, state))
    jax.tree.map(np.testing.assert_array_equal, made, expected)


def test_a_snapshot_is_cut_into_small_files_and_read_as_one(tmp_path: Path) -> None:
    rows = SNAPSHOT_BYTES // 2 // 1024
    masters = {f"layers.{layer}.weight": jnp.full((rows, 1024), layer, jnp.float32) for layer in range(2)}
    save_snapshot(tmp_path, "target", masters, 40)
    assert len(list(tmp_path.glob("target-*.npz"))) == 2
    assert snapshot_step(tmp_path, "target") == 40
    jax.tree.map(np.testing.assert_array_equal, load_snapshot(tmp_path, "target"), masters)
    assert load_snapshot(tmp_path, "replay") is None
