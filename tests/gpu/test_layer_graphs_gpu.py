"""Decoder layers from CUDA graphs: the steps of layers that run as ever, without a host wait, in memory that does
not grow.
"""

import copy
import gc
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.values import SEGMENT_ATTRIBUTE
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
from lightning_fastft.graphs.cuda_recorder import CudaRecorder
from lightning_fastft.graphs.install import install_layer_graphs
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.moe.install import install_bincount_router
from lightning_fastft.patches.packed import install_packed_training
from tests.gpu.test_decoder_gpu import make_model
from tests.support.host_waits import waits_are_errors
from tests.support.layer_pairs import add_lora, assert_as_near, fuse, step, use_exact_norms
from tests.support.packs import make_batch, relative_error
from tests.support.sizes import sizes

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
# 512 tokens: few documents, many, one; the last two are of kinds of their own.
PACKS = (
    (190, 1, 64, 257),
    (200, 56, 256),
    (128,) * 4,
    (250, 250, 12),
    (16,) * 32,
    (512,),
    (5, 507),
    (190, 1, 64, 257),
    (255, 257),
    (30,) * 17 + (2,),
)
# 405 to 512 tokens, each pack of another length.
RAGGED = tuple((190, 1, 64, last) for last in (150, 257, 203, 241, 177, 229, 165, 251, 219, 187))
CONFIG = sizes(vocab=97, width=256, inner=512, layers=2, heads=4, key_heads=2, head_width=64, positions=1024)
MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "norm_topk_prob": True}


def prepare(model, *, policy, is_recorded, if_launch_bound=False):
    """The model on the device; its copies, and its graphs where it has them."""
    model = copy.deepcopy(model).to("cuda")
    install_bincount_router(model, ModelPatcher())
    copies = install_low_precision_adapters(model, ModelPatcher(), compute_dtype=torch.bfloat16)
    fuse(model)
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing(policy))
    graphs = install_layer_graphs(model, ModelPatcher(), if_launch_bound=if_launch_bound)[0] if is_recorded else None
    return model, copies, graphs


def run(model, batch):
    """Forward and backward; returns the loss, without the graph that it came from."""
    loss = model(**batch).loss
    loss.backward()
    return loss.detach()


def train(model, copies, batches, *, rate=0.02):
    """Steps of plain gradient descent on the masters; loss and gradients of every step."""
    found = []
    for batch in batches:
        loss = run(model, batch)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.grad is not None}
        found.append({"loss": loss.clone(), **{name: parameter.grad.clone() for name, parameter in trained.items()}})
        with torch.no_grad():
            for parameter in trained.values():
                parameter.data.sub_(rate * parameter.grad)
        copies.refresh(is_after_step=True)
        model.zero_grad(set_to_none=True)
    return found


def wide_lora(family):
    """A bf16 model with adapters in fp32."""
    return add_lora(make_model(family, has_lora=False).requires_grad_(False), r=16, adapter_dtype=torch.float32).train()


@pytest.mark.parametrize("packs", [PACKS, RAGGED])
@pytest.mark.parametrize("policy", ["keep", "recompute"])
@pytest.mark.parametrize(("family", "has_lora"), [("qwen3", True), ("qwen3", False), ("gpt_oss", True)])
def test_steps_are_as_near_to_the_truth_as_those_without_graphs(family, has_lora, policy, packs):
    model = wide_lora(family) if has_lora else make_model(family, has_lora=False)
    truth = copy.deepcopy(model).double()
    install_packed_training(truth, ModelPatcher())
    use_exact_norms(truth, is_plain=True)
    batches = [make_batch(lengths, seed=number) for number, lengths in enumerate(packs)]
    on_device = [batch.to("cuda") for batch in batches]
    recorded, copies, graphs = prepare(model, policy=policy, is_recorded=True)
    found = train(recorded, copies, on_device, rate=0.0)
    assert graphs.num_replays == 3 * (len(packs) - 2), graphs.reasons
    own = train(*prepare(model, policy=policy, is_recorded=False)[:2], on_device, rate=0.0)
    for number in range(2, len(packs)):
        each, plain = ({name: value.cpu() for name, value in steps[number].items()} for steps in (found, own))
        assert_as_near(each, own=plain, truth=step(truth, batches[number]))


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_recorded_layers_see_what_a_step_has_changed(policy):
    model = wide_lora("qwen3")
    batches = [make_batch(PACKS[number % 3], seed=number % 3).to("cuda") for number in range(9)]
    recorded, copies, _ = prepare(model, policy=policy, is_recorded=True)
    found = train(recorded, copies, batches, rate=0.05)
    moving, standing = (
        train(*prepare(model, policy=policy, is_recorded=False)[:2], batches, rate=rate) for rate in (0.05, 0.0)
    )
    names = [name for name in moving[-1] if "lora_B" in name]
    # Rounding adds up over the steps, and is far from what the steps change.
    for name in names:
        assert relative_error(found[-1][name], moving[-1][name]) <= 0.1 * relative_error(
            standing[-1][name], moving[-1][name]
        ), name


def test_a_window_of_micro_batches_adds_up():
    model = wide_lora("qwen3")
    batches = [make_batch(lengths, seed=number).to("cuda") for number, lengths in enumerate(PACKS[:3])]
    found = []
    for is_recorded in (True, False):
        each, _, _ = prepare(model, policy="keep", is_recorded=is_recorded)
        for _ in range(3):
            each.zero_grad(set_to_none=True)
            for batch in batches:
                run(each, batch)
        found.append(
            {name: parameter.grad.clone() for name, parameter in each.named_parameters() if parameter.grad is not None}
        )
    assert all(relative_error(found[0][name], value) <= 0.01 for name, value in found[1].items())


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_replays_wait_for_nothing_and_need_no_more_memory(policy):
    model, copies, graphs = prepare(wide_lora("gpt_oss"), policy=policy, is_recorded=True)
    batches = [make_batch(lengths, seed=number).to("cuda") for number, lengths in enumerate(PACKS)]
    train(model, copies, batches)
    torch.cuda.synchronize()
    reserved = torch.cuda.memory_reserved()
    with waits_are_errors():
        for _ in range(3):
            for batch in batches:
                run(model, batch)
                model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() == reserved
    assert graphs.num_replays == 3 * (4 * len(PACKS) - 2)


def test_recordings_that_are_all_dropped_are_no_obstacle_to_the_next():
    recorder, number = CudaRecorder(torch.device("cuda", 0)), torch.zeros((), device="cuda")
    for _ in range(2):
        recorder.record(lambda: number.add_(torch.ones_like(number)))
        gc.collect()
    recorder.record(lambda: number.add_(torch.ones_like(number)))()
    assert number.item() == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_recording_that_cannot_begin_leaves_the_process_as_it_was(when):
    recorder, number, begin = (
        CudaRecorder(torch.device("cuda", 0)),
        torch.zeros((), device="cuda"),
        torch.cuda.CUDAGraph.capture_begin,
    )

    def fail(graph, *args, **options):
        if when == "after":
            begin(graph, *args, **options)
        raise RuntimeError("planted")

    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", fail), pytest.raises(RuntimeError, match="planted"):
        recorder.record(lambda: number.add_(1))
    assert torch.rand(8, device="cuda").ge(0).all()
    recorder.record(lambda: number.add_(1))()
    assert number.item() == 1


def test_memory_of_graphs_is_given_back():
    model = wide_lora("qwen3")
    batches = [make_batch(lengths, seed=number).to("cuda") for number, lengths in enumerate(PACKS)]
    each = copy.deepcopy(model).to("cuda")
    copies = install_low_precision_adapters(each, ModelPatcher(), compute_dtype=torch.bfloat16)
    fuse(each)
    install_packed_training(each, ModelPatcher())
    train(each, copies, batches)
    # cuBLAS keeps a workspace for each stream.
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    patcher = ModelPatcher()
    install_layer_graphs(each, patcher)
    train(each, copies, batches)
    patcher.undo()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + 4 * 2**20


@pytest.mark.alone
def test_layers_are_recorded_where_the_device_waits_for_the_host_and_only_there():
    model = wide_lora("qwen3")
    batches = [make_batch(lengths, seed=number).to("cuda") for number, lengths in enumerate(PACKS)]
    for cycles_ahead in (0, 2_000_000_000):
        each, copies, graphs = prepare(model, policy="keep", is_recorded=True, if_launch_bound=True)
        train(each, copies, batches[:2])
        with waits_are_errors():
            for batch in batches[2:4]:
                torch.cuda._sleep(max(1, cycles_ahead))
                train(each, copies, [batch])
        train(each, copies, batches[4:])
        expected = ("inactive", 0) if cycles_ahead else ("active", 3 * (len(PACKS) - 4))
        assert (graphs.status().state, graphs.num_replays) == expected, graphs.status().reason


@pytest.mark.alone
def test_without_the_memory_layers_run_as_ever():
    # Where everything is kept without a plan there is no budget.
    model, copies, graphs = prepare(wide_lora("qwen3"), policy="recompute", is_recorded=True, if_launch_bound=True)
    for layer in graphs._layers:
        vars(layer.self_attn)[SEGMENT_ATTRIBUTE].vram_budget_bytes = torch.cuda.memory_allocated() + 2**16
    train(model, copies, [make_batch(lengths, seed=number).to("cuda") for number, lengths in enumerate(PACKS)])
    assert graphs.num_replays == 0
    assert graphs.status().reason.startswith("recordings may take")
    assert graphs.status().reason.endswith("0.0 GiB are free")


HELD_SCRIPT = """
import torch
from lightning_fastft.core.errors import SwapError
from tests.gpu.test_layer_graphs_gpu import PACKS, make_batch, prepare, run, wide_lora
model, _, _ = prepare(wide_lora("qwen3"), policy="keep", is_recorded=True)
batches = [make_batch(lengths).to("cuda") for lengths in PACKS[:3]]
held = model(**batches[0]).loss
held.backward()
run(model, batches[1])
try:
    run(model, batches[2])
except SwapError as error:
    assert "keep loss.detach()" in str(error), error
    print("refused", torch.randn(2, device="cuda").isfinite().all().item())
"""


def test_a_loss_that_is_held_with_its_graph_is_named_and_the_process_lives_on():
    # A recording that fails is nothing for the other tests of this process.
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HELD_SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip().endswith("refused True"), done.stdout + done.stderr[-3000:]


@pytest.mark.alone
def test_a_loss_that_is_held_with_its_graph_is_no_error_where_recording_was_left_to_us():
    script = HELD_SCRIPT.replace("is_recorded=True", "is_recorded=True, if_launch_bound=True").replace(
        "PACKS[:3]", "PACKS[:6]"
    )
    script = (
        script.rpartition("try:")[0]
        + """
losses = [run(model, batch) for batch in batches[2:]]
assert torch.stack(losses).isfinite().all()
assert "keep loss.detach()" in graphs.status().reason, graphs.status()
print("as ever", graphs.num_replays, torch.randn(2, device="cuda").isfinite().all().item())
"""
    )
    script = script.replace("model, _, _ = prepare", "model, _, graphs = prepare")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    # All three layers were recorded forward, in one step.
    assert done.stdout.strip().endswith("as ever 3 True"), done.stdout + done.stderr[-3000:]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_nf4_layers_and_adapters_of_experts_are_recorded(family):
    config = AutoConfig.for_model(family, **{**CONFIG, **(MIXTURE if family == "qwen3_moe" else {})})
    model = build_model(
        ModelSource(config, init="random"),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        quantization="nf4",
        seed=0,
    )
    experts = (
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]} if family == "qwen3_moe" else {}
    )
    model = add_lora(model, r=16, adapter_dtype=torch.float32, **experts).train()
    batches = [make_batch(lengths, seed=number).to("cuda") for number, lengths in enumerate(PACKS)]
    recorded, copies, graphs = prepare(model, policy="keep", is_recorded=True)
    found = train(recorded, copies, batches, rate=0.0)
    assert graphs.num_replays == 2 * (len(PACKS) - 2), graphs.reasons
    expected = train(*prepare(model, policy="keep", is_recorded=False)[:2], batches, rate=0.0)
    for own, plain in zip(found, expected):
        for name, value in plain.items():
            assert relative_error(own[name], value) <= 0.05, name
