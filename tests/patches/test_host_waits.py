import functools

import pytest
import torch

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.patches.attention import install_attention
from tests.support.host_waits import count_host_waits
from tests.support.packs import make_batch
from tests.support.tiny_models import MOE, TINY, build_tiny

pytestmark = pytest.mark.covering


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: int(x.argmax()),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.nonzero(),
        lambda x: torch.where(x > 0),
        lambda x: torch.bincount(x.abs().long()),
        lambda x: torch.unique(x),
        lambda x: torch.repeat_interleave(x.abs().long()),
        lambda x: x.index_put_((x > 0,), torch.tensor(0.0)),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: torch.equal(x, x),
        lambda x: f"{x.sum():.2f}",
    ],
)
def test_counter_sees_a_wait(wait):
    x = torch.randn(5)
    with count_host_waits() as waits:
        wait(x)
    assert waits.total >= 1, waits.count


def test_counter_sees_a_wait_in_the_backward_and_in_recomputation():
    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * grad.sum().item()

    x = torch.randn(5, requires_grad=True)
    with count_host_waits() as waits:
        Waiting.apply(x).sum().backward()
    assert waits.total == 1
    with count_host_waits() as waits:
        torch.utils.checkpoint.checkpoint(lambda x: (x * x.sum().item()).sin(), x, use_reentrant=False).sum().backward()
    assert waits.total == 2


def test_counter_sees_no_wait_where_there_is_none():
    x = torch.randn(5, requires_grad=True)
    with count_host_waits() as waits:
        torch.where(x > 0, x, x.relu())[torch.tensor([0, 3])].softmax(0).sum().backward()
        torch.nn.functional.one_hot(torch.tensor([0, 2]), num_classes=3)  # checks its input on a CPU only
    assert waits.total == 0, waits.origin


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_packed_step_never_waits(name, recomputes):
    """Forward, backward and recomputation; of experts the grouped form, whose eager loop waits by design."""
    model = build_tiny(name, experts="grouped_mm" if name in MOE else None).train()
    install_attention(model, ModelPatcher())
    if recomputes:
        checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=False)
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    batch = make_batch(pad_to=40)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=True)
    with count_host_waits() as waits:
        model(**batch).loss.backward()
        optimizer.step()
    assert batch.context.num_reads == (4 if recomputes else 2)
    assert waits.total == 0, waits.origin


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_same_step_without_a_context_waits(name):
    """The teeth of the test above: transformers' own packed path is seen to wait."""
    model = build_tiny(name, attention="sdpa").train()
    batch = make_batch()
    with count_host_waits() as waits:
        model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)
    assert waits.total >= 1
