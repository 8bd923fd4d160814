"""Every kind of side against another one, on the golden checkpoints."""

import numpy as np
import pytest

from pallas_kernels.backend import KernelUnsupportedError
from tests.comparison.conftest import UNTIL
from tests.helpers import golden
from v41jax.comparison.run import FREE, compare

FIVE, PICO = map(golden.directory, ("five-layer", "pico"))


def test_quantized_layers_depart_nowhere_and_flips_are_located(sides, prompt):
    """The whole of `pico`, quantized: what differs are rounding flips, each with two values that agree."""
    left, right = (sides(text, PICO) for text in ("reference:quant", "xla:quant"))
    result = compare(left, right, [prompt], end=False)
    assert result.first is None, result.first
    for flip in result.flips:
        assert abs(flip.left - flip.right) < 1e-4
    compared = {item.operation for item in result.worst()}
    assert {"index_scores", "candidate_blocks", "routed_output", "engram_row_ids", "logits"} <= compared


def test_a_recording_made_elsewhere_is_a_side(sides):
    left = sides(f"npz:{golden.directory('pico')}/expected.npz@noquant.float32", PICO)
    result = compare(left, sides("reference", PICO), [left.ids], end=False)
    assert result.first is None
    assert len(result.worst()) >= 12 * 2 + 5 + 2
    with pytest.raises(ValueError, match="it was recorded for another prompt"):
        left.observe(left.ids[1:])


@pytest.mark.parametrize("right", ["xla:quant,packed", "xla:quant,weights=stored"])
def test_other_ways_to_store_and_compute_are_no_departure(right, sides, prompt):
    result = compare(sides("xla:quant", PICO), sides(right, PICO), [prompt], end=False, until=UNTIL)
    assert result.first is None, result.first


def test_a_kernel_that_takes_no_float32_is_named(sides, prompt):
    with pytest.raises(
        KernelUnsupportedError, match="block_scaled_linear: no Pallas kernel, it computes in bfloat16, not float32"
    ):
        sides("pallas:quant", FIVE).observe(prompt[:24], until=1)


def test_another_index_plane_departs_at_the_index_keys(sides, prompt):
    result = compare(sides("xla:quant", PICO), sides("xla:quant,index=fp8", PICO), [prompt], end=False, until=UNTIL)
    assert result.first is not None and result.first.operation == "index_keys"


def test_free_running_from_other_weights_departs_everywhere(sides, prompt, tmp_path):
    """`model=DIR` takes another checkpoint; here one with a smaller clamp."""
    result = compare(sides("reference", PICO), sides("reference"), [prompt], mode=FREE, end=False)
    assert result.first is not None and result.first.operation == "shared_hidden"
    assert len(result.layers[0].departures) > 1


def test_logits_of_both_sides(sides, prompt):
    left, right = sides("reference", FIVE), sides("xla:chunks=16", FIVE)
    result = compare(left, right, [prompt[:32]], layers=False)
    assert result.end is not None and result.end.rows == 32 and result.end.top1 == 1
    assert result.end.logits_max < 1e-5 and result.end.kl_max < 1e-9
    assert len(result.rows[0]) == 32
    assert np.isfinite(result.end.nll_left)
