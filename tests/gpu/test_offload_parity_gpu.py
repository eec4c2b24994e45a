"""R11: training with activations on the host, with every copy delayed, ends in the bits of training that keeps
them: losses and weights.
"""

import pytest
import torch
from peft import LoraConfig

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.lora import add_adapters
from lightning_fastft.patches.packed import install_packed_training
from tests.gpu.test_offload_gpu import DelayedLanes, all_on_host, deterministic  # noqa: F401 (a fixture)
from tests.planner.plan_trials import PlannedModel
from tests.support.engine_use import describe_use
from tests.support.late_streams import LateStreams
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny

NUM_LAYERS, BUFFERS, HOST_GIB = 4, 2, 1.0
# Packs of different lengths, the longest first: sizes of slots stay, contents of them do not fill them.
PACKS = {"cpu": ((9, 1, 14, 7), (5, 8), (12, 1, 1, 6)), "cuda": ((300, 1, 512, 211), (97, 400), (256, 1, 1, 130))}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
# A few steps with copies at the last moment on a CPU; the promise itself on a device.
ON_DEVICES = pytest.mark.parametrize(
    ("device", "num_steps"),
    [
        pytest.param("cpu", 6, id="cpu"),
        pytest.param("cuda", 100, id="cuda", marks=[pytest.mark.gpu, pytest.mark.slow(20)]),
    ],
)
KINDS = pytest.mark.parametrize("kind", ["full", "lora"])


class Careless(LateStreams):
    """The fault on a CPU: nobody waits for a copy."""

    def wait_compute(self, mark):
        """Wait for nothing."""


class CarelessOnDevice(DelayedLanes):
    """The fault on a device; copies are later than the host ever is with its launches, so that what is read too
    early is really not there.
    """

    least_ms, most_ms = 40.0, 41.0

    def wait_compute(self, mark):
        """Wait for nothing."""


def delayed(device):
    return LateStreams(seed=5) if device.type == "cpu" else DelayedLanes(device, seed=5)


def careless(device):
    return Careless() if device.type == "cpu" else CarelessOnDevice(device, seed=5)


def make_model(kind, device):
    base = build_tiny("qwen3", num_hidden_layers=NUM_LAYERS).to(device, DTYPES[device])
    if kind == "full":
        return base.train()
    # Dropout: a layer that runs again must draw what it drew.
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, init_lora_weights=False)
    torch.manual_seed(1)
    return add_adapters(base, lora=lora, adapter_dtype=torch.float32).train()


def offload_inputs(model, batches, make_copy_streams):
    """Inputs of layers on the host; the rest runs again."""
    checkpointing = OffloadCheckpointing("offload", buffers=BUFFERS, host_budget=HOST_GIB)
    install_packed_training(model, ModelPatcher(), checkpointing=checkpointing)
    (stack,) = checkpointing.stacks
    stack.executor.make_copy_streams = make_copy_streams
    return stack


def offload_everything(model, batches, make_copy_streams):
    """Inputs and all values that can be kept on the host; nothing but cheap parts runs again."""
    planned = PlannedModel(model, batches, make_copy_streams=make_copy_streams, buffers=BUFFERS)
    planned.follow(all_on_host(planned.value_names))
    return planned.stack


def keep(model, batches, make_copy_streams):
    install_packed_training(model, ModelPatcher(), checkpointing=OffloadCheckpointing("keep"))


def train(kind, device, num_steps, install, make_copy_streams=delayed):
    """Return the losses of all steps, the trained weights after the last, and the stack under offload."""
    model = make_model(kind, device)
    batches = [make_batch(lengths, seed=seed).to(device) for seed, lengths in enumerate(PACKS[device])]
    stack = install(model, batches, make_copy_streams)
    model.zero_grad(set_to_none=True)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-3, fused=True)
    torch.manual_seed(2)
    losses = []
    for step in range(num_steps):
        loss = model(**batches[step % len(batches)]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), {name: parameter.detach().cpu() for name, parameter in trained.items()}, stack


def differing(one, other):
    return [name for name in one if not torch.equal(one[name], other[name])]


@ON_DEVICES
@KINDS
@pytest.mark.parametrize("install", [offload_inputs, offload_everything], ids=["inputs", "everything"])
def test_training_with_offload_is_bit_equal_to_training_without(kind, install, device, num_steps, deterministic):  # noqa: F811
    losses, weights, _ = train(kind, device, num_steps, keep)
    offloaded_losses, offloaded_weights, stack = train(kind, device, num_steps, install)
    num_equal, different = int((losses == offloaded_losses).sum()), differing(weights, offloaded_weights)
    print(
        f"R11: {kind}, {install.__name__}, {device}: {num_equal} of {num_steps} losses equal, {len(different)} of "
        f"{len(weights)} weights differ"
    )
    assert torch.isfinite(losses).all()
    assert len(set(losses.tolist())) > num_steps // 2
    assert num_equal == num_steps
    assert weights.keys() == offloaded_weights.keys()
    assert different == []
    use = describe_use(stack.engine)
    assert 0 < use["pinned_bytes"] <= HOST_GIB * 2**30
    assert use["pinned_used_bytes"] == 0
    assert len(stack.engine.slots) == BUFFERS
    stack.executor.close_engine()
    assert stack.engine is None


@ON_DEVICES
@pytest.mark.parametrize("install", [offload_inputs, offload_everything], ids=["inputs", "everything"])
def test_a_wait_that_is_missing_changes_the_bits(install, device, num_steps, deterministic):  # noqa: F811
    losses, weights, _ = train("full", device, min(num_steps, 10), keep)
    found, found_weights, _ = train("full", device, min(num_steps, 10), install, make_copy_streams=careless)
    assert not torch.equal(losses, found)
    assert differing(weights, found_weights)
