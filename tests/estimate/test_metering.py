"""The meter: what kernels on the meta device take, against rates worked out by hand and against what autograd really
saves.
"""

import pytest
import torch
from torch import nn

from lightning_fastft.estimate.machines import find_gpu
from lightning_fastft.estimate.metering import Kernel, Meter, MeteredDevice
from lightning_fastft.kernels.backends import one_kernel
from lightning_fastft.kernels.cross_entropy.reference import row_losses
from lightning_fastft.kernels.grouped_mm.reference import RowAddend, grouped_mm
from lightning_fastft.kernels.rms_norm.op import rms_norm_forward
from lightning_fastft.kernels.rms_norm.reference import NormForm, rms_norm_backward
from lightning_fastft.mixers.fla_functions import fla_kernel

H200 = find_gpu("H200")
ROWS = 4096
# Between two kernels.
GAP_MS = 0.002


def metered(run, **options):
    meter = Meter(**{"document_tokens": 2048.0, **options})
    with meter:
        run()
    return meter


def taken_ms(run, **options):
    return sum(kernel.ms_on(H200) for kernel in metered(run, **options).kernels)


def meta(*shape, dtype=torch.bfloat16, **options):
    return torch.empty(*shape, dtype=dtype, device="meta", **options)


def flash(q, kv, *, window=-1):
    start = torch.empty(3, dtype=torch.int32, device="meta")
    return torch.ops.aten._flash_attention_forward(
        q, kv, kv, start, start, ROWS, ROWS, 0.0, True, False, window_size_left=window, window_size_right=0
    )


@one_kernel
def write_by_name(x, out):
    """A kernel that returns nothing."""


@one_kernel
def write_in_order(x, outs_OI):
    """A kernel that returns what it wrote."""
    return outs_OI


def test_a_kernel_on_tensors_of_the_same_form_is_metered_alike_and_run_once():
    runs = []

    @one_kernel
    def halves(x, *, whole):
        runs.append(x.shape)
        return x, (x[..., ::2] if whole is None else whole[..., ::2] + 1, len(x), None)

    x, held = meta(ROWS, 64), []
    meter = metered(lambda: held.extend(halves(meta(ROWS, 64), whole=x) for _ in range(2)), resident=[x])
    first, again = meter.kernels
    assert first == again
    for given, (half, *rest) in held:
        assert (given.shape, half.shape, half.dtype, rest) == ((ROWS, 64), (ROWS, 32), x.dtype, [ROWS, None])
    # What is given back is the input, what is new has memory of its own.
    assert held[0][0] is not held[1][0]
    assert meter.live_bytes == 2 * 2 * ROWS * (64 + 32)
    held.clear()
    del given, half, rest
    assert meter.count_live() == 0
    assert len(runs) == 1
    # Other forms run, and views are made each time.
    for _ in range(2):
        metered_again = meter.run_kernel(halves.__wrapped__, (x,), {"whole": None})
        assert metered_again[1][0].untyped_storage()._cdata == x.untyped_storage()._cdata
    meter.run_kernel(halves.__wrapped__, (x.float(),), {"whole": x})
    assert len(runs) == 4


def test_a_large_product_takes_its_flops_and_a_thin_one_its_bytes():
    x, wide, thin = meta(ROWS, 8192), meta(8192, 8192), meta(8192, 4)
    large = taken_ms(lambda: x @ wide)
    assert large == pytest.approx(2 * ROWS * 8192**2 / 690e12 * 1e3 + GAP_MS)
    assert taken_ms(lambda: x @ thin) == pytest.approx(2 * (ROWS * 8192 + 8192 * 4 + ROWS * 4) / 4.3e12 * 1e3 + GAP_MS)


def test_views_and_allocations_take_nothing_and_elementwise_work_its_bytes():
    x = meta(ROWS, 1024)
    idle = metered(lambda: (x.view(-1).view(ROWS, 1024).transpose(0, 1), torch.empty_like(x)))
    assert not idle.kernels
    (added,) = metered(lambda: x + x).kernels
    assert added.ms_on(H200) == pytest.approx(3 * 2 * ROWS * 1024 / (0.8 * 4.3e12) * 1e3 + GAP_MS)


def test_a_kernel_of_ours_is_one_pass_and_holds_its_results_only():
    x, weight = meta(ROWS, 1024), meta(1024)
    held = []
    meter = metered(lambda: held.append(rms_norm_forward(x, weight, form=NormForm(eps=1e-6))), resident=[x])
    (kernel,) = meter.kernels
    # The rows in and out, and the weight.
    num_bytes = 2 * 2 * ROWS * 1024 + 2 * 1024
    assert kernel.ms_on(H200) == pytest.approx(num_bytes / (0.8 * 4.3e12) * 1e3 + GAP_MS)
    assert meter.start_peak() == 2 * ROWS * 1024


@pytest.mark.parametrize(
    ("document_tokens", "rate"), [(512, 133e12), (2048, 273e12), (8192, 438e12), (100, 133e12), (65536, 556e12)]
)
def test_attention_runs_at_the_rate_measured_for_its_documents(document_tokens, rate):
    q, kv = meta(ROWS, 40, 128), meta(ROWS, 8, 128)
    taken = taken_ms(lambda: flash(q, kv), document_tokens=document_tokens)
    assert taken == pytest.approx(4 * 40 * 128 * ROWS * document_tokens / 2 / rate * 1e3 + GAP_MS)


@pytest.mark.parametrize(
    ("num_tokens", "document_tokens", "bytes_per_value"),
    # The sum of flash attention in fp32; the workspace of cuDNN; its fourth part, with copies of a group of heads.
    [(ROWS, 2048, 4 * (1 + 128 / 2048)), (ROWS, 8192, 12), (131_072, 131_072, (12 + 8) / 4)],
)
def test_the_backward_of_attention_takes_temporary_memory(num_tokens, document_tokens, bytes_per_value):
    q, kv = meta(num_tokens, 40, 128), meta(num_tokens, 8, 128)
    start, lse, state = (
        meta(3, dtype=torch.int32),
        meta(40, num_tokens, dtype=torch.float32),
        meta(2, dtype=torch.int64),
    )
    meter = Meter(document_tokens=document_tokens, resident=[q, kv, start, lse, state])
    with meter:
        gradients = torch.ops.aten._flash_attention_backward(
            q, q, kv, kv, q, lse, start, start, num_tokens, num_tokens, 0.0, True, state, state
        )
    gradient_bytes = sum(gradient.nbytes for gradient in gradients)
    assert meter.peak_bytes - gradient_bytes == pytest.approx(bytes_per_value * q.numel())


def test_a_window_bounds_what_a_query_sees():
    q, kv = meta(ROWS, 40, 128), meta(ROWS, 8, 128)
    whole = taken_ms(lambda: flash(q, kv), document_tokens=2048) - GAP_MS
    windowed = taken_ms(lambda: flash(q, kv, window=255), document_tokens=2048) - GAP_MS
    # A quarter of the keys, at the rate of short documents.
    assert windowed == pytest.approx(whole / 4 * 273 / 133)


def test_what_lives_after_a_forward_is_what_autograd_saves():
    def block(device):
        with torch.device(device):
            return nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.LayerNorm(256), nn.Linear(256, 64))

    saved = {}

    def pack(tensor):
        if not isinstance(tensor, nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(32, 64)
    model = block("cpu")
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    expected = sum(size for pointer, size in saved.items() if pointer not in weights | {x.untyped_storage().data_ptr()})

    model, x = block("meta"), meta(32, 64, dtype=torch.float32)
    meter = Meter(document_tokens=32, resident=[x, *model.parameters()])
    with meter:
        out = model(x)
        assert meter.start_peak() - out.numel() * 4 == expected
        del out
        assert meter.start_peak() == 0


def test_memory_that_reuses_an_id_is_counted():
    x, meter = meta(100), Meter(document_tokens=32)
    with meter:
        for _ in range(20):
            x + x
        kept = [x + x for _ in range(20)]
        assert meter.start_peak() == len(kept) * 200


def test_views_of_and_writes_to_older_memory_are_no_new_memory():
    x, out = meta(8, 64), meta(8, 64)
    held = []
    meter = metered(
        lambda: held.extend((x.detach(), x.add_(1), torch.mul(x, x, out=out), x.new_empty(8)[:4])), resident=[]
    )
    assert meter.start_peak() == 2 * 8


def test_memory_that_becomes_resident_is_live_no_longer():
    x, meter = meta(100), Meter(document_tokens=32)
    with meter:
        first, second = x + x, x + x
        meter.add_resident([first, x])
        views = [first.view(10, 10), second.view(10, 10)]
        assert meter.start_peak() == views[1].numel() * 2


def test_a_clock_sums_the_kernels_between_two_moments():
    meter = Meter(document_tokens=32)
    device = MeteredDevice(meter)
    meter.kernels += [Kernel(0.0, 690e9), Kernel(4.3e9, 0.0), Kernel(0.0, 0.0)]
    begin = device.now()
    device.ms_of = lambda kernel: 0.5
    assert device.ms_between(0, begin) == 1.5
    device.ms_of = lambda kernel: kernel.ms_on(H200)
    assert device.ms_between(0, 2) == pytest.approx(1.0 + 1.0 + 2 * GAP_MS)
    assert device.ms_between(begin, device.now()) == 0.0


@pytest.mark.parametrize("run", [write_by_name, write_in_order])
def test_what_a_kernel_writes_counts_once_and_is_not_read(run):
    x, out = meta(ROWS, 1024), meta(ROWS, 1024)
    (kernel,) = metered(lambda: run(x, out)).kernels
    assert kernel.num_bytes == pytest.approx(2 * 2 * ROWS * 1024 / 0.8)


@pytest.mark.parametrize(("dtype", "tflops"), [(torch.bfloat16, 474), (torch.float8_e4m3fn, 753)])
def test_grouped_products_run_at_the_rate_of_their_width(dtype, tflops):
    x, weight, ends = meta(ROWS, 2048, dtype=dtype), meta(4, 2048, 768, dtype=dtype), meta(4, dtype=torch.int32)
    out = meta(ROWS, 768)
    (kernel,) = metered(lambda: grouped_mm(x, weight, ends, addend=RowAddend(), out_NO=out)).kernels
    assert kernel.ms_on(H200) == pytest.approx(2 * ROWS * 2048 * 768 / (tflops * 1e9) + GAP_MS)


@pytest.mark.parametrize(("needs_weight", "ms"), [(False, 0.102), (True, 0.177)])
def test_the_backward_of_a_norm_takes_what_was_measured(needs_weight, ms):
    """Rows "rms_norm backward, 8192 x 5120" of results.csv."""
    x, weight = meta(8192, 5120), meta(5120)
    options = {"form": NormForm(eps=1e-6), "addend_TD": x, "needs_weight": needs_weight}
    assert taken_ms(lambda: rms_norm_backward(x, x, weight, **options)) == pytest.approx(ms, rel=0.1)


def test_the_loss_takes_what_was_measured():
    """Row "cross_entropy loss and gradient, 2048 x 151936" of results.csv."""
    options = {"scale": 1.0, "softcap": None, "gradient_factor": 1.0, "count_correct": False}
    logits, target = meta(2048, 151_936), meta(2048, dtype=torch.int64)
    assert taken_ms(lambda: row_losses(logits, target, **options)) == pytest.approx(0.492, rel=0.05)


def test_a_kernel_of_fla_core_reaches_a_third_of_the_bandwidth():
    x, outs = meta(2**20), []
    meter = metered(lambda: outs.extend(fla_kernel(x, (torch.empty_like(x),))), resident=[x])
    (kernel,) = meter.kernels
    assert kernel.num_bytes == pytest.approx((x.nbytes + outs[0].nbytes) / 0.35)
    assert meter.live_bytes == outs[0].nbytes
