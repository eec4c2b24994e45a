"""Streamed weights and the host embedding on a CUDA device: bit-equal under late copies, no host wait, and the
memory really goes.
"""

import functools
import gc

import pytest
import torch
from peft import LoraConfig
from torch.utils.checkpoint import checkpoint

from benchmarks.offload_rig import SerialCopyStreams
from lightning_fastft.activations.slots import PinnedSlab
from lightning_fastft.activations.streams import CudaCopyStreams
from lightning_fastft.activations.weights import WeightStreamer
from lightning_fastft.core.errors import HostMemoryError, ShapeError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.hf.lora import add_adapters
from lightning_fastft.kernels.host_gather.op import host_gather
from lightning_fastft.patches.attention import install_attention
from lightning_fastft.patches.host_ends import install_host_embedding, install_host_head, movable_bytes
from lightning_fastft.patches.weight_streaming import install_weight_streaming
from tests.support.packs import make_batch

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)
LENGTHS = (130, 1, 257, 64, 37)
# About a millisecond on one H200.
SLEEP_CYCLES = 2_000_000


class SleepyLanes(CudaCopyStreams):
    """Copies begin late: the copy stream sleeps before each of them."""

    def copy_in(self, device, host, *, after):
        with torch.cuda.stream(self.in_stream):
            torch.cuda._sleep(SLEEP_CYCLES)
        return super().copy_in(device, host, after=after)


class EarlyLanes(CudaCopyStreams):
    """Copies that forget what they must wait for: the control."""

    def copy_in(self, device, host, *, after):
        return super().copy_in(device, host, after=())


class Host:
    """Pinned memory for one test."""

    def __init__(self):
        self.slabs = []

    def __call__(self, num_bytes):
        self.slabs.append(PinnedSlab(num_bytes, device=DEVICE))
        return self.slabs[-1].reserve(num_bytes).tensor

    def close(self):
        for slab in self.slabs:
            slab.close()


@pytest.fixture
def host():
    host = Host()
    yield host
    torch.cuda.synchronize()
    host.close()


def lora_model(quantization, *, num_layers=6, hidden=256, recomputes=False):
    config = {
        "model_type": "qwen3",
        "vocab_size": 97,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "num_hidden_layers": num_layers,
    }
    base = build_model(
        ModelSource(config, init="random"), device=DEVICE, dtype=torch.bfloat16, quantization=quantization
    )
    install_attention(base, ModelPatcher())
    if recomputes:
        run_again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        base._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run_again)
    model = add_adapters(base, lora=LoraConfig(r=8), adapter_dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05)
    return model.train()


def make_step_batch(seed):
    return make_batch(LENGTHS, seed=seed, pad_to=512).to("cuda")


def run(model):
    """Two steps with accumulation, an evaluation between; losses and gradients."""
    results = []
    for seeds in ((1, 2), (3,)):
        for seed in seeds:
            loss = model(**make_step_batch(seed)).loss
            loss.backward()
            results.append(loss.detach())
        results += [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            results.append(model.eval()(**make_step_batch(4)).loss)
        model.train()
    return results


def is_same(results, expected):
    return len(results) == len(expected) and all(torch.equal(result, truth) for result, truth in zip(results, expected))


def requested_bytes():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


def poison(streamer):
    for target in streamer._targets:
        target.fill_(0xFF)
    torch.cuda.synchronize()


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_steps_are_bit_equal_with_late_copies(quantization, recomputes, host):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        model = lora_model(quantization, recomputes=recomputes)
        expected = run(model)
        assert is_same(run(model), expected), "the resident model itself is not deterministic"
        for streams in (CudaCopyStreams(DEVICE), SleepyLanes(DEVICE), SerialCopyStreams(DEVICE)):
            patcher = ModelPatcher()
            _, streamer = install_weight_streaming(model.get_base_model(), patcher, streams=streams, allocate_host=host)
            move_ends(model, patcher, streams=streams, host=host)
            poison(streamer)
            assert is_same(run(model), expected)
            patcher.undo()
            assert is_same(run(model), expected)
    finally:
        torch.use_deterministic_algorithms(False)


def move_ends(model, patcher, *, streams, host):
    """Move the embedding and the head to the host; the head is fetched in parts, in the forward of every layer."""
    base = model.get_base_model()
    assert install_host_embedding(base, patcher, streams=streams, allocate_host=host).state == "active"
    head = install_host_head(base, patcher, streams=streams, allocate_host=host)
    assert head.status.state == "active"

    def prefetch(module, args):
        if torch._C._current_graph_task_id() == -1:
            head.prefetch(len(base.model.layers))

    for layer in base.model.layers:
        patcher.add_undo(layer.register_forward_pre_hook(prefetch).remove)


def read_slowly(streams, host, *, num_layers=9, num_bytes=2**20):
    """Compute that lags far behind the host reads each layer's tensor; returns whether every read was right."""
    layers = [[torch.full((num_bytes,), index, dtype=torch.uint8, device=DEVICE)] for index in range(num_layers)]
    streamer = WeightStreamer(layers, streams=streams, allocate_host=host)
    streamer.attach()
    poison(streamer)
    reads = []
    for index in (*range(num_layers), *reversed(range(num_layers))):
        streamer.use(index, direction=1 if len(reads) < num_layers else -1)
        torch.cuda._sleep(SLEEP_CYCLES)
        reads.append((index, layers[index][0].clone()))
    torch.cuda.synchronize()
    is_right = all(bool((read == index).all()) for index, read in reads)
    streamer.detach()
    return is_right


def test_a_slot_is_overwritten_only_when_compute_has_left_it(host):
    assert read_slowly(CudaCopyStreams(DEVICE), host)
    assert read_slowly(SleepyLanes(DEVICE), host)
    # The teeth: without the marks of the compute stream the same reads are wrong.
    assert not read_slowly(EarlyLanes(DEVICE), host)


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_step_never_waits_for_the_device(quantization, host):
    model = lora_model(quantization, recomputes=True)
    patcher, streams = ModelPatcher(), CudaCopyStreams(DEVICE)
    install_weight_streaming(model.get_base_model(), patcher, streams=streams, allocate_host=host)
    move_ends(model, patcher, streams=streams, host=host)
    for seed in range(2):
        model(**make_step_batch(seed)).loss.backward()
    batch = make_batch(LENGTHS, seed=2, pad_to=512).pin_memory()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**batch.to("cuda", non_blocking=True)).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    patcher.undo()


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_device_memory_falls_by_what_was_moved_and_comes_back(quantization, host):
    def step():
        model(**make_step_batch(1)).loss.backward()
        model.zero_grad(set_to_none=True)

    model = lora_model(quantization, num_layers=12, hidden=512)
    # Workspaces of the libraries come with the first step.
    step()
    before = requested_bytes()
    patcher, streams = ModelPatcher(), CudaCopyStreams(DEVICE)
    _, streamer = install_weight_streaming(model.get_base_model(), patcher, streams=streams, allocate_host=host)
    ends = movable_bytes(model.get_base_model())
    assert min(ends) > 0
    move_ends(model, patcher, streams=streams, host=host)
    expected = before - streamer.num_host_bytes + streamer.num_slot_bytes - ends.total
    # The host region rounds each tensor up to 512 bytes, the device does not.
    assert requested_bytes() == pytest.approx(expected, abs=512 * 1024)
    assert streamer.num_slot_bytes < 0.3 * streamer.num_host_bytes
    during = requested_bytes()
    step()
    step()
    assert requested_bytes() == during
    patcher.undo()
    assert requested_bytes() == pytest.approx(before, abs=64 * 1024)


def test_weights_that_never_were_on_the_device_can_be_streamed(host):
    layers = [[torch.full((3, 5), float(index))] for index in range(5)]
    streamer = WeightStreamer(layers, streams=CudaCopyStreams(DEVICE), allocate_host=host)
    streamer.attach()
    for index in range(5):
        streamer.use(index, direction=1)
        assert layers[index][0].device == DEVICE
        assert bool((layers[index][0] == index).all())
    streamer.detach(device=torch.device("cpu"))
    assert [(tensor.device.type, float(tensor.mean())) for (tensor,) in layers] == [
        ("cpu", float(index)) for index in range(5)
    ]


def test_generation_from_streamed_weights(host):
    model = lora_model("nf4").eval()
    inputs = {
        "input_ids": torch.randint(3, 97, (2, 12), device="cuda"),
        "attention_mask": torch.ones(2, 12, dtype=torch.long, device="cuda"),
    }
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    patcher, streams = ModelPatcher(), CudaCopyStreams(DEVICE)
    install_weight_streaming(model.get_base_model(), patcher, streams=streams, allocate_host=host)
    move_ends(model, patcher, streams=streams, host=host)
    assert model.get_base_model().device.type == "cuda"
    assert torch.equal(model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None), expected)
    patcher.undo()


def test_pageable_memory_is_refused():
    model = lora_model(None)
    streams = CudaCopyStreams(DEVICE)
    for install in (install_weight_streaming, install_host_embedding, install_host_head):
        with pytest.raises(HostMemoryError, match="pinned"):
            install(model.get_base_model(), ModelPatcher(), streams=streams)
    with pytest.raises(ShapeError, match="pageable"):
        host_gather(torch.zeros(3, 2), torch.tensor([1], device="cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_host_gather_equals_index_select_on_registered_memory(dtype, host):
    num_rows, num_columns = 5003, 5120
    table = (
        host(num_rows * num_columns * dtype.itemsize).view(dtype)[: num_rows * num_columns].view(num_rows, num_columns)
    )
    table.copy_(torch.randn(num_rows, num_columns).to(dtype))
    token_T = torch.randint(0, num_rows, (4096,), device="cuda")
    before = requested_bytes()
    rows_TD = host_gather(table, token_T)
    assert requested_bytes() - before == rows_TD.numel() * rows_TD.element_size()
    assert torch.equal(rows_TD, table.cuda().index_select(0, token_T))
