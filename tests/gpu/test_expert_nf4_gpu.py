"""Experts in NF4 on a CUDA device at real sizes: bitsandbytes' bits, no host wait, and no more memory than one
dense stack.
"""

import copy

import bitsandbytes.functional as bnb
import pytest
import torch
from torch import nn

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.expert_nf4 import quantise_experts, read_nf4
from lightning_fastft.hf.expert_nf4_tensor import ExpertsNF4, quantise_stack
from lightning_fastft.kernels.nf4_experts.op import dequantise_stack
from lightning_fastft.moe.install import install_bincount_router
from tests.hf.test_expert_nf4 import add_lora, stacks_of, with_dense_weights
from tests.support.host_waits import waits_are_errors
from tests.support.nf4_stacks import check, expert_state, make_truth
from tests.support.tiny_models import VOCABULARY, build_tiny

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Experts and their stack: Qwen3-30B-A3B gate_up and down (fewer experts), gpt-oss, more than 2^31 weights.
SIZES = [(16, 1536, 2048), (16, 2048, 768), (4, 2880, 5760), (700, 1536, 2048)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_expert_equals_bitsandbytes(dtype):
    check(dequantise_stack, *make_truth(5, 1031, dtype, device="cuda"))


@pytest.mark.parametrize("size", SIZES)
def test_real_stacks_equal_bitsandbytes(size):
    generator = torch.Generator("cuda").manual_seed(0)
    num_experts, num_rows, num_columns = size
    # The same few experts again and again where the stack is large.
    some = torch.randn((4, num_rows, num_columns), generator=generator, device="cuda").mul_(0.02).bfloat16()
    few = quantise_stack(some)
    again = torch.arange(num_experts, device="cuda") % 4
    stack = few.stack._replace(
        **{name: getattr(few.stack, name).index_select(0, again) for name in few.stack._fields[:4]}
    )
    weight = ExpertsNF4(stack, shape=size, dtype=torch.bfloat16)
    out = torch.full(size, float("nan"), dtype=torch.bfloat16, device="cuda")
    with waits_are_errors():
        weight.dense(out=out)
    for expert in {0, 1, 2, 3, num_experts // 2, num_experts - 1}:
        truth = bnb.dequantize_4bit(*expert_state(few, expert % 4))
        assert torch.equal(out[expert], truth), expert


def test_moves_between_host_and_device_keep_every_bit():
    model = build_tiny("gpt_oss").bfloat16()
    quantise_experts(model)
    before = copy.deepcopy(model)
    model.cuda()
    for name, stack in stacks_of(model).items():
        assert {part.device.type for part in stack.stack} == {"cuda"}
        assert stack.device.type == "cuda"
        assert all(torch.equal(a.cpu(), b) for a, b in zip(stack.stack, stacks_of(before)[name].stack))
        # The plain twin on the host and the kernel read the same bits.
        assert torch.equal(stack.dense().cpu(), stacks_of(before)[name].dense())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_step_is_bit_equal_to_the_dense_one_and_never_waits(family):
    torch.manual_seed(0)
    model = build_tiny(family, hidden_size=64).to("cuda", torch.bfloat16)
    quantise_experts(model)
    ids = torch.randint(3, VOCABULARY, (2, 64), device="cuda")
    results = []
    for each in (copy.deepcopy(model), with_dense_weights(model)):
        adapted = add_lora(each).train()
        install_bincount_router(adapted, ModelPatcher())
        logits = adapted(input_ids=ids, use_cache=False).logits
        logits.float().square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in adapted.parameters() if p.requires_grad)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results))


def test_reading_a_stack_takes_no_memory_but_the_buffer():
    experts = nn.Module()
    experts.is_transposed = False
    weight = quantise_stack(torch.randn(16, 1536, 2048, device="cuda", dtype=torch.bfloat16))
    read_nf4(experts, "weight", weight).dense()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    with waits_are_errors():
        read_nf4(experts, "weight", weight).dense()
    assert torch.cuda.max_memory_allocated() == held
