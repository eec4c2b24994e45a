"""Fused layers whose attention hands over its gradients of keys and values in shares, one for each query head, as
the flash kernels leave them.
"""

import pytest
import torch

from lightning_fastft.fused import attention
from tests.support.layer_pairs import build, is_served, layers_of, make_pair, step
from tests.support.packs import make_batch, relative_error

# Four query heads share a key head.
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES = ("llama", "qwen3", "gemma3", "gpt_oss")


class Repeated(torch.autograd.Function):
    """Heads of shape (T, H or G, W), keys and values repeated for each query head; their gradients are handed
    over and not given to autograd.
    """

    @staticmethod
    def forward(ctx, query, key, value, collect):
        ctx.collect = collect
        return query.view_as(query), *(x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))

    @staticmethod
    def backward(ctx, d_query, d_key, d_value):
        ctx.collect(d_key.contiguous(), d_value.contiguous())
        return d_query, None, None, None


@pytest.fixture
def shared_layers(monkeypatch):
    """Have attention of fused layers hand over shares; the layers that did."""
    served, attend_rows = [], attention.attend_rows

    def attend_by_head(module, query, key, value, mask, *, collect, **options):
        def note(*shares):
            served.append(module)
            collect(*shares)

        return attend_rows(module, *Repeated.apply(query, key, value, note), mask, collect=None, **options)

    monkeypatch.setattr(attention, "attend_rows", attend_by_head)
    return served


@pytest.mark.covering
@pytest.mark.parametrize("trained", ["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_shares_become_the_gradients_of_keys_and_values(family, trained, shared_layers):
    model, plain = make_pair(build(family, trained, **HEADS))
    batch = make_batch((7, 1, 12))
    is_fused, found = is_served(model, lambda: step(model, batch))
    assert is_fused
    assert shared_layers == [layer.self_attn for layer in reversed(layers_of(model))]
    expected = step(plain, batch)
    assert found.keys() == expected.keys()
    assert max(relative_error(found[name], value) for name, value in expected.items()) < 1e-5


def test_a_second_backward_of_the_same_forward_has_its_own_shares(shared_layers):
    model, _ = make_pair(build("qwen3", "lora", **HEADS))
    loss = model(**make_batch((7, 5))).loss
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first = torch.autograd.grad(loss, trained, retain_graph=True)
    second = torch.autograd.grad(2 * loss, trained)
    assert len(shared_layers) == 2 * len(layers_of(model))
    assert all(torch.equal(2 * one, other) for one, other in zip(first, second, strict=True))
