"""One AdamW step on a CUDA device: kernels against the truth for adapters of real shapes, one launch, no host
wait, no copy overwritten.
"""

import contextlib
from pathlib import Path

import pytest
import torch

from lightning_fastft.kernels.adamw_step import op
from lightning_fastft.kernels.adamw_step.op import adamw_step, grad_norm
from lightning_fastft.kernels.adamw_step.reference import StepOptions
from lightning_fastft.kernels.adamw_step.table import TensorTable
from lightning_fastft.training.optimization import host_moments
from lightning_fastft.training.optimizer import FusedAdamW
from tests.kernels.test_adamw_step import (
    BF16,
    COMBINATIONS,
    FP32,
    OPTIONS,
    check_every_part,
    check_run,
    check_step,
    is_current,
    make_rows,
    make_table,
)
from tests.support.host_waits import waits_are_errors
from tests.support.truth import assert_within_bound

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
# LoRA of rank 16: factors of attention and MLP of an 8B model, one stack of 128 experts.
SIZES = (16 * 4096, 16 * 1024, 16 * 14_336, 128 * 16 * 768)
COPIED = ((FP32, BF16, BF16),)


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_adapters_of_real_shapes_equal_the_truth(combination, offset):
    check_step(op, (combination,), sizes=SIZES, offset=offset, device="cuda")


def test_every_part_through_the_public_entries():
    check_every_part(op, device="cuda")
    check_run(op, weight_decay=0.0, device="cuda")


def run_steps(num_steps, *, is_stalled):
    """Steps whose gradients move each time; in one run the device begins only after the host has issued all of them."""
    torch.manual_seed(0)
    rows = make_rows(COPIED, sizes=SIZES, missing=(), offset=0, device="cuda")
    fresh = [[torch.randn(size, device="cuda").bfloat16() for size in SIZES] for _ in range(num_steps)]
    table = make_table(rows)
    norms = []
    torch.cuda.synchronize()
    with waits_are_errors():
        if is_stalled:
            torch.cuda._sleep(2_000_000_000)
        for step, grads in enumerate(fresh, start=1):
            for row, grad in zip(rows, grads):
                row.owner.grad = grad
            norms.append(grad_norm(table))
            options = StepOptions(learning_rate=torch.full((), 1e-2, device="cuda"), step=step)
            adamw_step(table, options=options, scale=1.0 / norms[-1])
            if not is_stalled:
                # An event that is asked for is no wait of the kind that is forbidden here, and yet the device is done.
                done = torch.cuda.Event()
                done.record()
                while not done.query():
                    pass
    torch.cuda.synchronize()
    return [*norms, *(tensor for row in rows for tensor in row[:4])]


def test_addresses_on_their_way_are_not_overwritten_and_the_host_never_waits():
    run_steps(2, is_stalled=False)
    expected = run_steps(12, is_stalled=False)
    ours = run_steps(12, is_stalled=True)
    assert all(torch.equal(one, other) for one, other in zip(ours, expected))


def test_building_a_table_does_not_wait():
    rows = make_rows(sizes=SIZES, offset=0, device="cuda")
    with waits_are_errors():
        table = make_table(rows)
        adamw_step(table, options=OPTIONS, scale=grad_norm(table))
    assert is_current(table, rows)


@pytest.mark.alone
def test_hundreds_of_tensors_take_one_launch_and_no_memory():
    params = [torch.randn(16, 1024, device="cuda") for _ in range(448)]
    for param in params:
        param.grad = torch.randn_like(param)
    averages, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    table = TensorTable(params, exp_avgs=averages, exp_avg_sqs=squares, copies=[param.bfloat16() for param in params])
    assert table.aligned == (True,)
    adamw_step(table, options=OPTIONS)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        adamw_step(table, options=OPTIONS)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    # Each event has an object of its own for its type: compared by value. What waits for the device may be listed
    # beside what runs on it.
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name for name in names if "sync" not in name.lower()] == ["_adamw_kernel"]


def make_stack(dtype=FP32):
    torch.manual_seed(8)
    layers = (torch.nn.Linear(128, 1000), torch.nn.GELU(), torch.nn.Linear(1000, 128), torch.nn.LayerNorm(128))
    return torch.nn.Sequential(*layers).to("cuda", dtype)


def backward(stack):
    with torch.enable_grad():
        stack(torch.randn(64, 128, device="cuda")).square().mean().backward()


def test_a_stack_trained_in_one_pass_is_as_exact_as_with_the_fused_optimizer_of_torch():
    ours, plain, truth = make_stack(), make_stack(), make_stack(torch.float64)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = FusedAdamW(ours.parameters(), **options)
    others = [
        torch.optim.AdamW(plain.parameters(), fused=True, **options),
        torch.optim.AdamW(truth.parameters(), **options),
    ]
    copies, told = [param.detach().bfloat16() for param in ours.parameters()], []
    optimizer.attach_copies(lambda: list(zip(ours.parameters(), copies)), on_written=told.append)
    for _ in range(10):
        optimizer.zero_grad()
        backward(ours)
        # All three get the gradients of ours.
        for one, other, true in zip(ours.parameters(), plain.parameters(), truth.parameters()):
            other.grad, true.grad = one.grad.clone(), one.grad.double()
        norm = optimizer.clip_next(0.05)
        true_norm = torch.nn.utils.clip_grad_norm_(truth.parameters(), 0.05)
        plain_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        assert_within_bound("norm", norm, plain=plain_norm, truth=true_norm, dtype=FP32)
        for stepper in (optimizer, *others):
            stepper.step()
    for (name, param), other, true, copy in zip(
        ours.named_parameters(), plain.parameters(), truth.parameters(), copies
    ):
        assert_within_bound(name, param.detach(), plain=other.detach(), truth=true.detach(), dtype=FP32)
        assert torch.equal(copy, param.bfloat16()), name
    assert [len(written) for written in told] == [len(copies)] * 10
    # The state of the other one is on the device, and is read from there once.
    optimizer.load_state_dict(others[0].state_dict())
    assert {float(state["step"]) for state in optimizer.state.values()} == {10.0}


def test_clipping_and_a_step_never_wait():
    stack = make_stack()
    copies = [param.detach().bfloat16() for param in stack.parameters()]
    optimizer = FusedAdamW(stack.parameters(), lr=1e-2)
    optimizer.attach_copies(lambda: list(zip(stack.parameters(), copies)), on_written=lambda written: None)
    for step in range(3):
        optimizer.zero_grad()
        backward(stack)
        torch.cuda.synchronize()
        # The first step makes state and tables, the others find them.
        with waits_are_errors():
            norm = optimizer.clip_next(1.0)
            optimizer.step()
        assert norm.isfinite(), f"step {step}"


def run_optimizer(offload):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size, device="cuda").bfloat16()) for size in SIZES]
    optimizer = FusedAdamW(params, lr=1e-2, optim_bits=8, rounding="stochastic", rounding_seed=3, offload=offload)
    norms = []
    for step in range(6):
        for param in params:
            param.grad = torch.randn_like(param)
        # The first step pins memory and compiles.
        with waits_are_errors() if step else contextlib.nullcontext():
            norms.append(optimizer.clip_next(1.0))
            optimizer.step()
    states = optimizer.state_dict()["state"]
    # Here, because the memory is unpinned when the optimizer is gone.
    on_host = [state["exp_avg"].is_cpu and state["exp_avg"].is_pinned() for state in states.values()]
    return params, torch.stack(norms), states, on_host


def test_moments_on_the_host_have_the_bits_of_those_on_the_device(monkeypatch):
    # Some twenty pieces, so that each slot is used again and again.
    monkeypatch.setattr(host_moments, "PIECE_BYTES", 2**18)
    (params, norms, states, on_host), *others = (run_optimizer(share) for share in (0.0, 0.5, 1.0))
    assert not any(on_host)
    for twins, other_norms, other_states, _ in others:
        assert torch.equal(norms, other_norms)
        assert all(torch.equal(param, twin) for param, twin in zip(params, twins))
        for number, state in states.items():
            assert all(torch.equal(one.cpu(), other_states[number][name].cpu()) for name, one in state.items())
    assert all(others[-1][3])
