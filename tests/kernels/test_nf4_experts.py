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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed_EC": torch.zeros(2, 96, dtype=torch.int8)}, "packed_EC"),
        ({"packed_EC": torch.zeros(2, 95, dtype=torch.uint8)}, "packed_EC"),
        ({"absmax_EQ": torch.zeros(3, 2, dtype=torch.uint8).T}, "contiguous"),
        ({"nested_absmax_EG": torch.zeros(2, 2)}, "nested_absmax_EG"),
        ({"offset_E": torch.zeros(1)}, "offset_E"),
        ({"quant_map_M": torch.zeros(15)}, "quant_map_M"),
        ({"nested_quant_map_M": torch.zeros(256, device="meta")}, "meta"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    stack, truth_EX = make_truth(2, 3, torch.float32)
    with pytest.raises(ShapeError, match=message):
        dequantise_stack(stack._replace(**change), truth_EX)


@pytest.mark.parametrize(
    ("out_EX", "message"),
    [
        (torch.zeros(192), "2 axes"),
        (torch.zeros(2, 192).double(), "dtype"),
        (torch.zeros(2, 190), "multiples of 64"),
        (torch.zeros(192, 2).T, "strides"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(out_EX, message):
    with pytest.raises(ShapeError, match=message):
        dequantise_stack(make_truth(2, 3, torch.float32)[0], out_EX)
