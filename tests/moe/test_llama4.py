"""Llama 4: routed rows only, same numbers as every expert on every token."""

import pytest
import torch

from lightning_fastft.core.patcher import ModelPatcher, share_state
from lightning_fastft.moe import interface as experts
from lightning_fastft.moe.llama4 import RoutedLlama4Experts, RoutedLlama4Moe
from tests.moe.test_install import TOLERANCE, CountedCore, distance, install, token_ids
from tests.support.tiny_models import build_tiny


def layer_of(num_experts_per_token):
    layer = build_tiny("llama4_text", num_experts_per_tok=num_experts_per_token).model.layers[0].feed_forward
    return layer.train()


def routed_twin(layer):
    """The swapped form of a layer, with the same state; the patcher takes the inner swap back."""
    patcher = ModelPatcher()
    patcher.replace_module(layer, "experts", share_state(layer.experts, RoutedLlama4Experts))
    return share_state(layer, RoutedLlama4Moe), patcher


@pytest.mark.covering
@pytest.mark.parametrize("num_experts_per_token", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1, 32), (2, 9, 32), (0, 5, 32)])
def test_outputs_and_gradients_are_those_of_every_expert_on_every_token(num_experts_per_token, shape):
    layer = layer_of(num_experts_per_token)
    parameters = list(layer.parameters())
    x = torch.randn(shape, requires_grad=True)
    direction = torch.randn(shape).reshape(-1, 32)

    def step(module):
        out_TD, logits_TE = module(x)
        return (
            out_TD,
            logits_TE,
            torch.autograd.grad((out_TD * direction).sum() + logits_TE.square().sum(), [x, *parameters]),
        )

    theirs = step(layer)
    twin, _ = routed_twin(layer)
    with CountedCore() as core:
        ours = step(twin)
    assert len(core.calls) == 1
    assert ours[0].shape == theirs[0].shape
    assert distance(ours[0], theirs[0]) <= TOLERANCE
    assert torch.equal(ours[1], theirs[1])
    assert all(distance(a, b) <= TOLERANCE for a, b in zip(ours[2], theirs[2]))


def test_only_routed_rows_are_computed_in_the_order_of_the_experts(monkeypatch):
    twin, _ = routed_twin(layer_of(3))
    seen = []
    run = experts.run_experts
    monkeypatch.setattr(
        experts, "run_experts", lambda x, ids, *args, **options: seen.append((x, ids)) or run(x, ids, *args, **options)
    )
    twin(torch.randn(1, 5, 32))
    ((x_ND, expert_N1),) = seen
    assert x_ND.shape[0] == 15
    # transformers adds the experts of a token up in the order of their ids.
    assert (expert_N1.view(5, 3).diff(dim=1) > 0).all()


def test_ties_and_extreme_scores_choose_what_the_router_chose():
    layer = layer_of(2)
    with torch.no_grad():
        layer.router.weight[1] = layer.router.weight[0]
        layer.router.weight[2:] = -60 * layer.router.weight[0]
    x = torch.cat((torch.randn(8, 32), torch.zeros(2, 32)))[None]
    expected = layer(x)[0]
    twin, _ = routed_twin(layer)
    assert distance(twin(x)[0], expected) <= TOLERANCE


def test_router_logits_are_recorded_before_and_after_the_swap():
    model = build_tiny("llama4_text")
    expected = model.model(input_ids=token_ids(), output_router_logits=True)
    patcher, _ = install(model)
    ours = model.model(input_ids=token_ids(), output_router_logits=True)
    assert set(ours.keys()) == set(expected.keys())
    if "router_logits" in expected:
        assert len(ours.router_logits) == len(expected.router_logits)
        assert all(distance(a, b) <= TOLERANCE for a, b in zip(ours.router_logits, expected.router_logits))
    patcher.undo()


def test_dense_layers_of_the_model_stay():
    model = build_tiny("llama4_text", interleave_moe_layer_step=2, moe_layers=[1])
    dense = model.model.layers[0].feed_forward
    expected = model(input_ids=token_ids()).logits
    patcher, (status,) = install(model)
    assert status.reason.startswith("1 MoE layers (4 experts, 2 per token), llama4_text")
    assert model.model.layers[0].feed_forward is dense
    assert distance(model(input_ids=token_ids()).logits, expected) <= TOLERANCE
    patcher.undo()
