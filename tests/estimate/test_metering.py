"""The meter: what operators on the meta device take, against rates worked out by hand and against what autograd
really saves.
"""

import pytest
import torch
from torch import nn

from lightning_fastft.estimate.machines import find_gpu
from lightning_fastft.estimate.metering import NF4_BYTES_PER_WEIGHT, Meter, Reading

H200 = find_gpu("H200")
ROWS = 4096


def metered(run, **options):
    meter = Meter(H200, **{"document_tokens": 2048.0, **options})
    with meter:
        run()
    return meter


def meta(*shape, dtype=torch.bfloat16, **options):
    return torch.empty(*shape, dtype=dtype, device="meta", **options)


def test_a_large_product_takes_its_flops_and_a_thin_one_its_bytes():
    x, wide, thin = meta(ROWS, 8192), meta(8192, 8192), meta(8192, 4)
    large = metered(lambda: x @ wide).read().device_ms
    assert large == pytest.approx(2 * ROWS * 8192**2 / 665e12 * 1e3)
    assert metered(lambda: x @ thin).read().device_ms == pytest.approx(
        2 * (ROWS * 8192 + 8192 * 4 + ROWS * 4) / 4.3e12 * 1e3
    )


def test_views_and_allocations_take_nothing_and_elementwise_work_its_bytes():
    x = meta(ROWS, 1024)
    idle = metered(lambda: (x.view(-1).view(ROWS, 1024).transpose(0, 1), torch.empty_like(x)))
    assert idle.read() == Reading(0.0, 0)
    added = metered(lambda: x + x)
    assert added.read().num_operators == 1
    assert added.read().device_ms == pytest.approx(3 * 2 * ROWS * 1024 / (0.8 * 4.3e12) * 1e3)


def test_a_quantized_weight_is_made_dense_before_each_product():
    x, weight = meta(ROWS, 1024), meta(2048, 1024)
    plain = metered(lambda: nn.functional.linear(x, weight), resident=[x, weight])
    quantized = metered(lambda: nn.functional.linear(x, weight), resident=[x, weight], quantized=[weight])
    extra = 2048 * 1024 * (2 + NF4_BYTES_PER_WEIGHT) / (0.48 * 4.3e12) * 1e3
    assert quantized.read().device_ms - plain.read().device_ms == pytest.approx(extra)
    assert quantized.peak_bytes - plain.peak_bytes == 2048 * 1024 * 2


@pytest.mark.parametrize(
    ("document_tokens", "rate"), [(512, 133e12), (2048, 273e12), (8192, 438e12), (100, 133e12), (65536, 556e12)]
)
def test_attention_runs_at_the_rate_measured_for_its_documents(document_tokens, rate):
    q, kv = meta(1, 40, ROWS, 128), meta(1, 8, ROWS, 128)
    meter = metered(
        lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, kv, kv, 0.0, True),
        document_tokens=document_tokens,
    )
    assert meter.read().device_ms == pytest.approx(4 * 40 * 128 * ROWS * document_tokens / 2 / rate * 1e3)


def test_the_backward_of_attention_takes_two_and_a_half_times_the_products_at_its_own_rate():
    q, kv = meta(1, 40, ROWS, 128, requires_grad=True), meta(1, 8, ROWS, 128, requires_grad=True)
    meter = Meter(H200, document_tokens=2048)
    with meter:
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, kv, kv, 0.0, True)[0]
        forward = meter.read()
        torch.autograd.grad(out, (q, kv), torch.empty_like(out))
    attention = 4 * 40 * 128 * ROWS * 1024 * 2.5 / 231e12 * 1e3
    # Gradients of keys and values, here the same tensor, are added.
    added = 3 * 2 * 8 * ROWS * 128 / (0.8 * 4.3e12) * 1e3
    assert meter.read().since(forward).device_ms == pytest.approx(attention + added)


def test_a_window_bounds_what_a_query_sees():
    meter = Meter(H200, document_tokens=8192)
    meter.limit_window(512)
    assert meter.num_keys == 512
    meter.limit_window(None)
    assert meter.num_keys == 4096


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
    meter = Meter(H200, document_tokens=32, resident=[x, *model.parameters()])
    with meter:
        out = model(x)
        assert meter.start_peak() - out.numel() * 4 == expected
        del out
        assert meter.start_peak() == 0


def test_memory_of_a_tensor_that_is_gone_is_no_longer_ignored():
    meter, x = Meter(H200, document_tokens=32), meta(100)
    for _ in range(20):
        meter.ignore(meta(100))
    with meter:
        kept = [x + x for _ in range(20)]
        assert meter.start_peak() == len(kept) * 200


def test_time_passes_on_the_host_where_the_device_is_faster():
    assert Reading(1.0, 10).ms() == 1.0
    assert Reading(0.1, 10).ms() == pytest.approx(0.4)
