import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_fastft.core.errors import ShapeError
from lightning_fastft.kernels.lora_linear import op
from lightning_fastft.kernels.lora_linear.op import lora_addmm
from tests.support.kernel_harness import planted_faults
from tests.support.loss_twins import lora_addmm_twin
from tests.support.truth import assert_within_bound, poisoned

NAMES = ("base", "x", "a_RD", "b_NR")
SCALE = 0.75


def make_inputs(num_tokens, dtype, *, rank=3, width=13, num_outputs=11, master_dtype=torch.float32):
    """Inputs in the compute dtype and masters in theirs; masters are values of the compute dtype, so that the
    truth is one number.
    """
    base, x = (
        poisoned(torch.randn(num_tokens, num_outputs).to(dtype)),
        poisoned(torch.randn(num_tokens, width).to(dtype)),
    )
    masters = [torch.randn(shape).to(dtype).to(master_dtype) for shape in ((rank, width), (num_outputs, rank))]
    return [tensor.detach().requires_grad_() for tensor in (base, x, *masters)]


def run_reference(inputs, d_out, *, dtype):
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
    out = lora_addmm_twin(*inputs, scale=SCALE)
    return [out.detach(), *torch.autograd.grad(out, inputs, d_out.to(dtype))]


def check_against_truth(function, num_tokens, dtype, *, rank=3, num_draws=8):
    """Errors are compared over several draws: with a handful of numbers one of two equal roundings is luckier."""
    # PyTorch's bf16 GEMM on a CPU reads past a strided row of odd width and multiplies what it finds by 0: NaN from
    # poison, in any caller.
    width, num_outputs = (13, 11) if dtype is torch.float32 else (14, 12)
    results = {name: [] for name in ("ours", "plain", "truth")}
    for _ in range(num_draws):
        inputs = make_inputs(num_tokens, dtype, rank=rank, width=width, num_outputs=num_outputs)
        d_out = poisoned(torch.randn(num_tokens, num_outputs).to(dtype))
        copies = (
            {"copy_a_RD": inputs[2].detach().to(dtype), "copy_b_NR": inputs[3].detach().to(dtype)}
            if dtype is not torch.float32
            else {}
        )
        out = function(*inputs, scale=SCALE, **copies)
        results["ours"].append([out.detach(), *torch.autograd.grad(out, inputs, d_out)])
        results["plain"].append(run_reference(inputs, d_out, dtype=dtype))
        results["truth"].append(run_reference(inputs, d_out, dtype=torch.float64))
    ours, plain, truth = ([torch.cat(tensors) for tensors in zip(*draws)] for draws in results.values())
    assert [tensor.dtype for tensor in ours] == [dtype, dtype, dtype, torch.float32, torch.float32]
    for name, one, other, true in zip(("out", *NAMES), ours, plain, truth):
        assert_within_bound(name, one, plain=other, truth=true, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 64, 65])
@pytest.mark.parametrize("rank", [1, 8])
def test_output_and_every_gradient_equal_the_truth(num_tokens, rank, dtype):
    check_against_truth(lora_addmm, num_tokens, dtype, rank=rank)


FAULTS = {
    "scale lost in the forward": "alpha={scale => 1.0}",
    "scale lost in the gradient of A and x": "{.mul_(ctx.scale) => } d_x",
    "scale lost in the gradient of B": "dtype=ctx.b_dtype){.mul_(ctx.scale) => }",
    "base dropped": "torch.addmm({ => 0 *}base.reshape(-1, base.shape[-1]),",
    "gradient of x lost": "d_x = {(d_low_TR @ copy_a_RD).view(x.shape => torch.zeros_like(x})",
    "masters' gradients rounded": "return {left.to(dtype) @ right => (left @ right)}.to(dtype)",
}


test_a_planted_fault_is_seen, test_without_a_fault_the_same_check_passes = planted_faults(
    op, lambda module: check_every_part(module.lora_addmm), FAULTS
)


def check_every_part(function):
    check_against_truth(function, 65, torch.float32)
    check_gradients_of_masters_are_not_rounded(function)


def check_gradients_of_masters_are_not_rounded(function):
    base, x, a_RD, b_NR = make_inputs(257, torch.bfloat16, width=14, num_outputs=12)
    out = function(
        base, x, a_RD, b_NR, scale=1.0, copy_a_RD=a_RD.detach().bfloat16(), copy_b_NR=b_NR.detach().bfloat16()
    )
    d_out = torch.randn(out.shape).bfloat16()
    (d_b_NR,) = torch.autograd.grad(out, b_NR, d_out)
    low_TR = (x @ a_RD.bfloat16().T).double()
    torch.testing.assert_close(d_b_NR.double(), d_out.double().T @ low_TR, rtol=1e-5, atol=1e-4)


def test_three_axes_equal_two():
    base, x, a_RD, b_NR = make_inputs(12, torch.float32)
    flat = lora_addmm(base, x, a_RD, b_NR, scale=SCALE)
    deep = lora_addmm(base.reshape(2, 6, -1), x.reshape(2, 6, -1), a_RD, b_NR, scale=SCALE)
    assert deep.shape == (2, 6, 11)
    assert torch.equal(deep.reshape(12, 11), flat)
    d_out = torch.randn(12, 11)
    for one, other in zip(
        torch.autograd.grad(flat, (base, x, a_RD, b_NR), d_out),
        torch.autograd.grad(deep, (base, x, a_RD, b_NR), d_out.view(2, 6, 11)),
    ):
        assert torch.equal(one, other)


def test_the_copies_are_what_is_computed_with():
    base, x, a_RD, b_NR = make_inputs(5, torch.float32)
    out = lora_addmm(base, x, a_RD, b_NR, scale=1.0, copy_a_RD=2 * a_RD.detach(), copy_b_NR=b_NR.detach())
    torch.testing.assert_close(out, base + 2 * (x @ a_RD.T) @ b_NR.T)


@pytest.mark.parametrize("trained", [("a_RD",), ("b_NR",), ("x",), ("a_RD", "b_NR")])
def test_only_what_is_trained_gets_a_gradient(trained):
    inputs = dict(zip(NAMES, make_inputs(5, torch.float32)))
    for name, tensor in inputs.items():
        tensor.requires_grad_(name in trained)
    lora_addmm(*inputs.values(), scale=1.0).sum().backward()
    assert [name for name, tensor in inputs.items() if tensor.grad is not None] == [
        name for name in NAMES if name in trained
    ]


def test_a_refresh_between_forward_and_backward_is_an_error():
    base, x, a_RD, b_NR = make_inputs(5, torch.bfloat16)
    copy_a_RD, copy_b_NR = a_RD.detach().bfloat16(), b_NR.detach().bfloat16()
    out = lora_addmm(base, x, a_RD, b_NR, scale=1.0, copy_a_RD=copy_a_RD, copy_b_NR=copy_b_NR)
    copy_b_NR.copy_(b_NR.detach() * 2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_backward_names_retain_graph():
    base, x, a_RD, b_NR = make_inputs(5, torch.float32)
    out = lora_addmm(base, x, a_RD, b_NR, scale=1.0).sum()
    out.backward(retain_graph=True)
    out.backward()
    with pytest.raises(RuntimeError, match="retain_graph"):
        out.backward()


def test_checkpointing_gives_the_same_gradients():
    inputs = make_inputs(7, torch.bfloat16)
    copies = {"copy_a_RD": inputs[2].detach().bfloat16(), "copy_b_NR": inputs[3].detach().bfloat16()}

    def layer(*tensors):
        return lora_addmm(*tensors, scale=SCALE, **copies).square().sum()

    kept = torch.autograd.grad(layer(*inputs), inputs)
    rebuilt = torch.autograd.grad(checkpoint(layer, *inputs, use_reentrant=False), inputs)
    assert all(torch.equal(one, other) for one, other in zip(kept, rebuilt))


def test_what_is_saved_is_x_the_low_rank_states_and_the_copies():
    base, x, a_RD, b_NR = make_inputs(5, torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tuple(tensor.shape)) or tensor, lambda tensor: tensor
    ):
        lora_addmm(base, x, a_RD, b_NR, scale=1.0)
    assert saved == [(5, 13), (5, 3), (3, 13), (11, 3)]


@pytest.mark.parametrize(
    "change",
    [
        {"a_RD": torch.zeros(3, 12)},
        {"b_NR": torch.zeros(11, 4)},
        {"base": torch.zeros(5, 1)},
        {"base": torch.zeros(1, 11)},
        {"base": torch.zeros(5, 11, dtype=torch.bfloat16)},
        {"x": torch.zeros(5, 13, dtype=torch.bfloat16)},
        {"copy_a_RD": torch.zeros(3, 13, dtype=torch.bfloat16)},
        {"copy_b_NR": torch.zeros(1, 3)},
    ],
)
def test_what_would_broadcast_or_cast_is_refused(change):
    inputs = dict(zip(NAMES, make_inputs(5, torch.float32))) | change
    with pytest.raises(ShapeError):
        lora_addmm(**inputs, scale=1.0)
