"""One AdamW step on a CUDA device: kernels against the truth for adapters of real shapes, one launch, no host wait, no copy overwritten."""

from pathlib import Path

import pytest
import torch

from lightning_fastft.kernels.adamw_step import reference
from lightning_fastft.kernels.adamw_step.op import adamw_step, grad_norm
from lightning_fastft.kernels.adamw_step.reference import StepOptions, TensorTable
from tests.host_waits import waits_are_errors
from tests.kernels.children import run_on_device
from tests.kernels.test_adamw_step import (
    BF16,
    COMBINATIONS,
    FP32,
    OPTIONS,
    PublicEntries,
    check_every_part,
    check_run,
    check_step,
    copy_rows,
    make_rows,
    make_table,
)

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
# LoRA of rank 16: factors of attention and MLP of an 8B model, one stack of 128 experts.
SIZES = (16 * 4096, 16 * 1024, 16 * 14_336, 128 * 16 * 768)
SHADOWED = ((FP32, BF16, BF16),)


@pytest.fixture(autouse=True)
def _no_graph():
    with torch.no_grad():
        yield


def test_the_triton_kernels_pass_their_tests_on_the_device():
    run_on_device("triton_adamw_step.py")


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_adapters_of_real_shapes_equal_the_truth(combination, offset):
    check_step(PublicEntries, (combination,), sizes=SIZES, offset=offset, device="cuda")


def test_every_part_through_the_public_entries():
    check_every_part(PublicEntries, device="cuda")
    check_run(PublicEntries, weight_decay=0.0, device="cuda")


def run_steps(num_steps, *, is_stalled):
    """Steps whose gradients move each time; in one run the device begins only after the host has issued all of them."""
    torch.manual_seed(0)
    rows = make_rows(SHADOWED, sizes=SIZES, missing=(), offset=0, device="cuda")
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
    assert table.is_current()


def test_hundreds_of_tensors_take_one_launch_and_no_memory():
    params = [torch.randn(16, 1024, device="cuda") for _ in range(448)]
    for param in params:
        param.grad = torch.randn_like(param)
    averages, squares = ([torch.zeros_like(param) for param in params] for _ in range(2))
    table = TensorTable(params, exp_avgs=averages, exp_avg_sqs=squares, shadows=[param.bfloat16() for param in params])
    assert table.aligned == (True,)
    adamw_step(table, options=OPTIONS)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        adamw_step(table, options=OPTIONS)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() == before
    kernels = [event for event in profile.events() if event.device_type is torch.autograd.DeviceType.CUDA]
    assert [event.name for event in kernels] == ["_adamw_kernel"]


def test_a_forced_reference_is_obeyed():
    rows = make_rows(sizes=SIZES, device="cuda")
    twins = copy_rows(rows)
    for row, twin in zip(rows, twins):
        twin.owner.grad = None if row.owner.grad is None else twin.grad
    adamw_step(make_table(rows), options=OPTIONS, backend="reference")
    reference.adamw_step(make_table(twins), options=OPTIONS)
    assert all(one is None or torch.equal(one, other) for row, twin in zip(rows, twins) for one, other in zip(row[:4], twin[:4]))
