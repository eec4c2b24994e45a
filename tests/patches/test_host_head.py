"""The output layer in host memory: no bit changes, the device has it only while the head runs, and it comes back."""

import weakref

import pytest
import torch
from torch import nn

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import SwapError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.head import LazyHead
from lightning_fastft.patches.host_ends import HostLazyHead, install_host_head, movable_bytes
from lightning_fastft.patches.packed import install_packed_training
from tests.patches.test_weight_streaming import evaluate, forward, lora_model, take
from tests.support.late_streams import LateStreams
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import packed_batches


def packed_model(name="llama"):
    """A model with adapters that trains packs, its base, and what undoes it."""
    model, patcher = lora_model(name, num_layers=2), ModelPatcher()
    install_packed_training(model, patcher)
    return model, model.get_base_model(), patcher


def packed_step(model, seed=0):
    (batch,) = packed_batches(1, seed=seed)
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *take(model)]


def all_uses(model):
    """A pack, a batch without a context, an evaluation, and logits as a tensor."""
    (batch,) = packed_batches(1, seed=1)
    with torch.inference_mode():
        logits = model(**batch, output_logits=True).logits
    found = [*packed_step(model), evaluate(model, 3), logits.clone()]
    loss = forward(model, 2)
    loss.backward()
    return [*found, loss.detach(), *take(model)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_no_bit_changes_and_it_comes_back(name):
    model, base, _ = packed_model(name)
    base.lm_head.weight = nn.Parameter(base.lm_head.weight.clone(), requires_grad=False)
    head, before = base.lm_head, base.lm_head.weight.clone()
    state = {key: value.clone() for key, value in base.state_dict().items()}
    expected = all_uses(model)
    assert movable_bytes(base).head == before.numel() * before.element_size()
    patcher = ModelPatcher()
    found = install_host_head(base, patcher, streams=LateStreams())
    assert found.status.state == "active", found.status.reason
    assert isinstance(base.lm_head, HostLazyHead)
    assert head.weight.untyped_storage().nbytes() == head.weight.element_size()
    # A head copies the rows that were not prefetched.
    for num_parts in (0, 1, 3):
        patch = ModelPatcher()
        for layer in base.model.layers if num_parts else ():
            handle = layer.register_forward_pre_hook(lambda *_, num_parts=num_parts: found.prefetch(num_parts))
            patch.add_undo(handle.remove)
        got = all_uses(model)
        patch.undo()
        assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))
    assert all(torch.equal(value, state[key]) for key, value in base.state_dict().items())
    with pytest.raises(SwapError, match="Load the model first"):
        base.load_state_dict(state)
    patcher.undo()
    assert base.lm_head is head
    assert isinstance(head, LazyHead)
    assert torch.equal(head.weight, before)
    assert all(torch.equal(one, other) for one, other in zip(all_uses(model), expected, strict=True))


def test_the_copy_is_gone_before_the_backward():
    model, base, _ = packed_model()
    copies = []
    install_host_head(base, ModelPatcher(), streams=LateStreams())
    take_copy = base.lm_head.device_weight

    def watched():
        copy = take_copy()
        copies.append(weakref.ref(copy))
        return copy

    base.lm_head.device_weight = watched
    (batch,) = packed_batches(1)
    loss = model(**batch).loss
    assert len(copies) == 1
    assert copies[0]() is None
    loss.backward()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_copy_that_no_head_takes_is_made_once_and_dropped_when_it_has_arrived(num_parts):
    _, base, _ = packed_model()
    streams = LateStreams()
    found = install_host_head(base, ModelPatcher(), streams=streams)
    for _ in range(num_parts + 1):
        found.prefetch(num_parts)
    assert streams.num_copies == len(streams._in) == num_parts
    found.drop()
    assert not streams._in
    found.drop()
    assert streams.num_copies == num_parts
    # Only a head that runs gets a copy again, and the next one ahead of time.
    found.prefetch(num_parts)
    assert streams.num_copies == num_parts
    base.lm_head.device_weight()
    found.prefetch(num_parts)
    assert streams.num_copies == num_parts + 2


def test_a_copy_of_a_pass_that_ended_early_is_dropped_when_its_first_part_has_arrived():
    _, base, _ = packed_model()
    streams = LateStreams()
    found = install_host_head(base, ModelPatcher(), streams=streams)
    found.prefetch(3)
    found.drop()
    assert streams.num_copies == 1
    assert not streams._in
    assert torch.equal(base.lm_head.device_weight(), base.state_dict()["lm_head.weight"])
    assert streams.num_copies == 2


def test_heads_that_have_to_stay_say_why():
    def reason_of(model):
        head = model.get_output_embeddings()
        found = install_host_head(model, patcher, streams=LateStreams())
        assert found.status.state == "inactive"
        assert found.prefetch is found.drop is None
        assert model.get_output_embeddings() is head
        assert movable_bytes(model).head == 0
        return found.status.reason

    patcher = ModelPatcher()
    assert reason_of(build_tiny("llama")) == "it is trained"
    assert "tied" in reason_of(build_tiny("llama", tie_word_embeddings=True).requires_grad_(False))
    other = build_tiny("llama").requires_grad_(False)
    other.lm_head = nn.Sequential(nn.Linear(32, 97))
    assert "not a plain linear layer" in reason_of(other)
    replaced, compiled = (build_tiny("llama").requires_grad_(False) for _ in range(2))
    replaced.lm_head.forward = replaced.lm_head.forward
    compiled.lm_head.compile(backend="eager")
    assert reason_of(replaced) == reason_of(compiled) == "its forward was replaced or compiled on this instance"
    active = build_tiny("llama").requires_grad_(False)
    assert install_host_head(active, patcher, streams=LateStreams()).status.state == "active"
    assert "not a plain linear layer" in reason_of(active)


def test_ends_that_a_module_around_the_model_holds_too_stay():
    root = nn.Module()
    root.model = lora_model("llama", num_layers=2)
    base = root.model.get_base_model()
    base.lm_head.weight = nn.Parameter(base.lm_head.weight.clone(), requires_grad=False)
    root.words, root.head = base.get_input_embeddings(), base.lm_head
    checkpointing, patcher = OffloadCheckpointing("recompute", weights="stream", host_budget=1.0), ModelPatcher()
    install_packed_training(root, patcher, checkpointing=checkpointing)
    checkpointing.place(torch.device("cpu"))
    states = {status.name: status for status in checkpointing.memory_statuses()}
    assert states["frozen weights"].state == "active"
    assert states["output layer"].state == states["input embedding"].state == "inactive"
    assert states["output layer"].reason == "its weight is tied: head, model.base_model.model.lm_head"
    assert root.head(root.words(torch.tensor([3]))).isfinite().all()
    patcher.undo()
