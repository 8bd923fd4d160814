"""Slots, transfers, gates and the validation of state operations."""

import pytest

from scheduler.states import (
    CheckpointSpec,
    ImageRestore,
    ImageStore,
    Relocation,
    StateMaintenanceOps,
    StateSlotPool,
    StateTransfer,
    TransferKind,
    gate_fixpoint,
    validate_ops,
)

SPEC = CheckpointSpec("layout", 1000, 2)


def test_copy_needs_a_matching_layout_and_the_others_take_none():
    assert StateTransfer.copy(SPEC).layout_id == "layout"
    with pytest.raises(ValueError, match="needs a layout id"):
        StateTransfer(TransferKind.COPY)
    with pytest.raises(ValueError, match="got a checkpoint of layout 'layout'"):
        StateTransfer(TransferKind.COPY, "other", SPEC)
    with pytest.raises(ValueError, match="got a checkpoint of layout None"):
        StateTransfer(TransferKind.COPY, "other")
    for kind in (TransferKind.REPLAY, TransferKind.NONE):
        with pytest.raises(ValueError, match="keeps no images"):
            StateTransfer(kind, "layout")
        with pytest.raises(ValueError, match="keeps no images"):
            StateTransfer(kind, checkpoint=SPEC)


def test_gates_are_applied_until_none_shortens_the_hit():
    # In series the answer would be 64, which the first gate cannot back.
    first = {128: 96, 96: 96, 64: 32, 32: 32, 0: 0}
    second = {96: 64, 64: 64, 32: 32, 0: 0}
    assert gate_fixpoint([first.__getitem__, second.__getitem__], 128) == 32
    assert gate_fixpoint([lambda _: 0, lambda tokens: tokens], 128) == 0
    assert gate_fixpoint([], 128) == 128


def test_slots_are_handed_out_lowest_first_and_only_once():
    slots = StateSlotPool(3)
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    slots.release(2)
    slots.release(0)
    assert slots.take() == 0
    with pytest.raises(RuntimeError, match="slot 2"):
        slots.release(2)


def test_exchange_allows_swaps_and_chains_and_changes_nothing_when_refused():
    slots = StateSlotPool(4)
    held = [slots.take() for _ in range(3)]
    slots.exchange([0, 1], [1, 3])  # 0 -> 1, 1 -> 3
    assert slots.free_slots() == (0,)
    before = slots.free_slots()
    with pytest.raises(ValueError, match="not free"):
        slots.exchange([held[0]], [2])
    with pytest.raises(ValueError, match="named twice"):
        slots.exchange([1, 3], [0, 0])
    assert slots.free_slots() == before


def store(**changes):
    return ImageStore(0, 0, (3, 4), 32, "layout", 1000)._replace(**changes)


def restore(**changes):
    return ImageRestore(0, 1, (3, 4), 32, "layout", 1000)._replace(**changes)


def check(ops, checkpoint=SPEC):
    validate_ops(ops, checkpoint, num_pages=8, num_slots=2, num_images=4)


def test_valid_operations_pass():
    check(StateMaintenanceOps((Relocation(0, 1), Relocation(1, 0)), (store(),), (restore(),)))


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        (StateMaintenanceOps(stores=(store(layout_id="old"),)), "layout 'old'"),
        (StateMaintenanceOps(stores=(store(image_bytes=999),)), "999 bytes"),
        (StateMaintenanceOps(stores=(store(units=(3,)),)), "2 distinct units"),
        (StateMaintenanceOps(stores=(store(units=(3, 3)),)), "2 distinct units"),
        (StateMaintenanceOps(stores=(store(units=(3, 8)),)), "leave 0..7"),
        (StateMaintenanceOps(stores=(store(slot=2),)), "slot 2"),
        (StateMaintenanceOps(restores=(restore(image=4),)), "image 4"),
        (StateMaintenanceOps(restores=(restore(), restore(image=1))), "restores write one slot twice"),
        (StateMaintenanceOps((Relocation(0, 1), Relocation(1, 1))), "relocations write one slot twice"),
        (StateMaintenanceOps((Relocation(0, 5),)), "slot 5"),
    ],
)
def test_faulty_operations_are_refused_before_anything_moves(ops, words):
    with pytest.raises(ValueError, match=words):
        check(ops)


def test_images_are_refused_where_the_transfer_keeps_none():
    with pytest.raises(ValueError, match="keeps no images"):
        check(StateMaintenanceOps(stores=(store(),)), checkpoint=None)


def test_all_faults_are_reported_together():
    with pytest.raises(ValueError, match=r"layout 'old'.*slot 9") as caught:
        check(StateMaintenanceOps(stores=(store(layout_id="old", slot=9, units=(0,)),)))
    assert str(caught.value).count(";") == 2
