"""Tests of the Triton kernels, run in a process of their own: TRITON_INTERPRET must be set before Triton is first
imported.

``test_interpreted.py`` runs them in the interpreter, ``tests/gpu/test_hybrid_layers_gpu.py`` on the device.
"""

from unittest import mock

import pytest
import torch

from lightning_fastft.kernels.delta_inputs import triton
from tests.kernels.test_delta_inputs import DTYPES, FORMS, LENGTHS, check
from tests.support.kernel_harness import DEVICE, planted_faults


def check_small(module, form, dtype=torch.float32):
    """More tokens than a block."""
    with mock.patch.object(module, "BLOCK_T", 4), mock.patch.object(module, "BLOCK_T_GATES", 4):
        check(module, form, (3, 1, 2), dtype, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_each_document_alone(form, dtype):
    # Blocks of tokens are many programs of the interpreter; test_more_tokens_than_a_block has small ones.
    check(triton, form, LENGTHS[0 if DEVICE == "cpu" else 2], dtype, device=DEVICE)


@pytest.mark.parametrize("form", FORMS)
def test_more_tokens_than_a_block(form):
    check_small(triton, form)


@pytest.mark.parametrize("num_taps", [1, 2, 7])
def test_number_of_taps(num_taps):
    check(triton, FORMS[0], LENGTHS[0], torch.float32, num_taps=num_taps, device=DEVICE)


def check_every_form(module):
    for form in FORMS:
        check_small(module, form)


FAULTS = {
    "taps over a border": (
        "({inside_tokens & (position >= shift) => inside_tokens & (tokens >= shift)})[:, None] & inside_cols[None, :] "
        "x = tl.load(x_ptr + (tokens - shift)[:, None] * x_stride + cols[None, :], mask=inside"
    ),
    "gradients over a border": "({inside_readers & (position >= later) => inside_readers})[:, None]",
    "taps reversed": "tl.load(weight_ptr + cols * NUM_TAPS + {(NUM_TAPS - 1 - shift) => shift}",
    "gradient of one tap": "tl.static_range({NUM_TAPS => 1}): readers",
    "keys read as queries": "{section * SECTION_STEP => 0 * section} +",
    "gradient of keys from queries": "else {second_d_ptr => first_d_ptr}",
    "groups side by side": "inner // GROUP_SIZE * {GROUP_STEP => (GROUP_SIZE * HEAD_WIDTH)}",
    "norm of the gradient lost": "scale * {(d - y * tl.sum(d * y, axis=1)[:, None]) => d}",
    "slope of silu": "d *= share {* (1.0 + pre * (1.0 - share)) => }",
    "decay without its bias": "a += {tl.load(dt_bias_ptr => 0 * tl.load(dt_bias_ptr}",
    "decay without its rate": "{-rate * _softplus(a) => -_softplus(a)}, mask",
    "gradient of the strength": "d_beta * beta {* (1.0 - beta) => }",
    "gradient of the bias": "tl.sum({d_a => d_g}, axis=0)",
    "gradient of the rate": "tl.sum(-d_g {* rate => } * _softplus(a), axis=0)",
    "partial sums of the first channel": "* num_channels {+ head * HEAD_WIDTH => } + cols",
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    triton, check_every_form, FAULTS
)
