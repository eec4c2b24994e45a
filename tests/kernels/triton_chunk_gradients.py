"""Tests of the Triton kernel, run in a process of their own (``tests/kernels/test_interpreted.py``, or on a GPU)."""

import pytest
import torch

from lightning_fastft.kernels.chunk_gradients import triton
from tests.kernels.test_chunk_gradients import LENGTHS, SHAPES, check, make_inputs, run
from tests.support.kernel_harness import DEVICE, NARROW, planted_faults

SHORT = (1, 67, 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_gradient_equals_the_truth(shape):
    check(triton.chunk_gradients, shape, torch.float32, device=DEVICE, lengths=SHORT)


def test_narrow_numbers():
    check(triton.chunk_gradients, SHAPES[1], NARROW, device=DEVICE, lengths=LENGTHS)


def test_two_calls_are_bit_equal_and_w_can_be_left_out():
    inputs, offsets = make_inputs(SHAPES[1], NARROW, device=DEVICE, lengths=SHORT)
    first, second = (run(triton.chunk_gradients, inputs, offsets) for _ in range(2))
    assert all(torch.equal(one, two) for one, two in zip(first, second))
    del inputs["d_value"]
    without = run(triton.chunk_gradients, inputs, offsets)
    assert without[2] is None
    assert torch.equal(without[3], first[3])


FAULTS = {
    "last row lost": "inside_rows, inside_keys = rows < end{ => - 1}",
    "a token does not see itself": "rows[:, None] {>= => >} rows[None, :]",
    "a key misses its own query": "rows[:, None] {<= => <} rows[None, :]",
    "state not decayed": "({tl.exp2(decay) => 0.0 * decay + 1.0} * scale)",
    "keys not decayed": "tl.where(inside_rows, {tl.exp2(decay_last - decay) => 1.0}, 0.0)",
    "gradient of the last decay lost": "d_decay {+ d_last => }, d_decay",
    "sign of w": "({-d_w => d_w}).to",
    "first member only": "for member in range({GROUP => 1})",
    "first block of values only": "for first in range(0, {VALUES => BLOCK_V}, BLOCK_V)",
    "place of the chunk lost": "+ {place => 0 * place} * BLOCK_C",
    "scale lost": "tl.exp2(difference) {* scale => }",
}


def check_one(module):
    check(module.chunk_gradients, (1, 2, 24, 70), torch.float32, device=DEVICE, lengths=SHORT)


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(triton, check_one, FAULTS)
