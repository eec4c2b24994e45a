"""Tests of the Triton kernels, run in a process of their own: TRITON_INTERPRET must be set before Triton is first
imported.

``test_interpreted.py`` runs them in the interpreter, ``tests/gpu/test_hybrid_layers_gpu.py`` on the device.
"""

from unittest import mock

import pytest
import torch

from lightning_fastft.kernels.head_gate import triton
from tests.kernels.test_head_gate import DTYPES, FORMS, check
from tests.support.kernel_harness import DEVICE, planted_faults


def check_small(module, form, dtype=torch.float32):
    """More heads than a tile and more tokens than programs."""
    with mock.patch.object(module, "MAX_TILE", 32), mock.patch.object(module, "MAX_PARTIALS", 3):
        check(module, 7, form, dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_the_truth(form, dtype):
    check(triton, 5, form, dtype, device=DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_more_heads_than_a_tile_and_more_tokens_than_programs(form):
    check_small(triton, form)


def test_without_tokens():
    check(triton, 0, FORMS[1], torch.float32, device=DEVICE)


def check_every_form(module):
    for form in FORMS:
        check_small(module, form)


FAULTS = {
    "last head lost": "while token < num_tokens: for start in range(0, NUM_HEADS{ => - BLOCK_H}, BLOCK_H)",
    "groups side by side": "heads // GROUP_SIZE * {GROUP_STEP => (GROUP_SIZE * HEAD_WIDTH)}",
    "head of the group lost": "heads % GROUP_SIZE {* HEAD_WIDTH => }",
    "slope of sigmoid": "slope = activated {+ gate * slope => }",
    "gate not multiplied": "activated *= {gate => 1.0}",
    "eps lost": "/ HEAD_WIDTH {+ eps => })",
    "mean lost": "d_x {- normed * mean => }",
    "weight of the gradient lost": "d_x *= {weight => 1.0}",
    "gate's gradient without weight": "scaled = normed {* weight => }",
    "sum of the last head alone": "weight_terms {+= => =} d_x * normed",
    "stride of the gradient lost": "d_gate_ptr + token {* d_gate_stride => }",
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_form, FAULTS
)
