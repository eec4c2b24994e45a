"""Tests of the Triton kernels, run in a process of their own: TRITON_INTERPRET must be set before Triton is first
imported.

``test_interpreted.py`` runs them in the interpreter, ``tests/gpu/test_hybrid_layers_gpu.py`` on the device.
"""

import os
from unittest import mock

import pytest
import torch

from lightning_fastft.kernels.head_gate import triton
from tests.kernels.test_head_gate import DTYPES, FORMS, check
from tests.support.truth import load_with_fault

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


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
    "last head lost": ("range(0, NUM_HEADS, BLOCK_H)", "range(0, NUM_HEADS - BLOCK_H, BLOCK_H)", "_backward_kernel"),
    "groups side by side": ("heads // GROUP_SIZE * GROUP_STEP", "heads // GROUP_SIZE * (GROUP_SIZE * HEAD_WIDTH)", ""),
    "head of the group lost": ("heads % GROUP_SIZE * HEAD_WIDTH", "heads % GROUP_SIZE", ""),
    "slope of sigmoid": ("slope = activated + gate * slope", "slope = activated", ""),
    "gate not multiplied": ("activated *= gate", "activated *= 1.0", ""),
    "eps lost": ("/ HEAD_WIDTH + eps)", "/ HEAD_WIDTH)", ""),
    "mean lost": ("d_x - normed * mean", "d_x", ""),
    "weight of the gradient lost": ("d_x *= weight", "d_x *= 1.0", ""),
    "gate's gradient without weight": ("scaled = normed * weight", "scaled = normed", ""),
    "sum of the last head alone": ("weight_terms += d_x * normed", "weight_terms = d_x * normed", ""),
    "stride of the gradient lost": ("d_gate_ptr + token * d_gate_stride", "d_gate_ptr + token", ""),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="planted faults read out of bounds; they belong into the interpreter")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, tmp_path):
    old, new, kept = FAULTS[fault]
    faulty = load_with_fault(triton, old, new, tmp_path, except_in=kept or None)
    with pytest.raises(AssertionError):
        check_every_form(faulty)


def test_without_a_fault_the_same_check_passes():
    check_every_form(triton)
