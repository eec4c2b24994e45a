"""Stacks in NF4 come back bit for bit as bitsandbytes reads each expert; the kernel itself in the interpreter and
by the compiler.
"""

import pytest
import torch

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.nf4_experts import reference
from lightning_fastft.kernels.nf4_experts.op import dequantise_stack
from tests.support.kernel_harness import planted_faults
from tests.support.nf4_stacks import check, make_truth
from tests.support.truth import Watch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_blocks", [1, 13, 255, 256, 257])
def test_equals_bitsandbytes(num_blocks, dtype):
    check(dequantise_stack, *make_truth(3, num_blocks, dtype))


FAULTS = {
    "low half first": "(packed_C {>> 4, packed_C & 15 => & 15, packed_C >> 4})",
    "scales not shifted": "* nested_Q {+ stack.offset_E[expert] => }",
    "first group for all": "{.repeat_interleave(GROUP_BLOCKS)[:num_blocks => [:1}]",
    "first expert's scales": "stack.absmax_EQ[{expert => 0}]",
}


test_a_fault_in_the_plain_twin_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    reference, lambda module: check(module.dequantise_stack, *make_truth(2, 300, torch.float32)), FAULTS
)


def test_no_experts_and_no_waits():
    stack, truth_EX = make_truth(2, 3, torch.float32)
    none = type(stack)(*(part[:0] for part in stack[:4]), *stack[4:])
    assert dequantise_stack(none, truth_EX[:0]).shape == (0, 192)
    with Watch() as watch:
        dequantise_stack(stack, truth_EX)
    assert watch.waits == []


def test_an_output_that_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match="multiples of 64"):
        dequantise_stack(make_truth(2, 3, torch.float32)[0], torch.zeros(2, 190))
