"""The experts function: gates are recognised or refused, sentinels count for nothing, users can choose it by its
name.
"""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.families import is_on_interface
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.moe import interface as experts
from lightning_fastft.moe.interface import fastft_experts_forward, gate_form, recognise_gate, register_experts
from tests.moe.test_install import TOLERANCE, distance, token_ids
from tests.support.tiny_models import build_tiny


def experts_of(name, **overrides):
    return build_tiny(name, experts="eager", **overrides).model.layers[1].mlp.experts


@use_experts_implementation
class OwnExperts(nn.Module):
    """Experts as a user writes them, on the interface."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 3
        self.gate_up_proj = nn.Parameter(torch.randn(3, 8, 6))
        self.down_proj = nn.Parameter(torch.randn(3, 6, 4))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        result = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            gate, up = (hidden_states[token] @ self.gate_up_proj[expert].T).chunk(2, dim=-1)
            output = (self.act_fn(gate) * up) @ self.down_proj[expert].T
            result = result.index_add(0, token, output * top_k_weights[token, place, None])
        return result


def own_experts(activation="silu", implementation="eager"):
    torch.manual_seed(3)
    return OwnExperts(SimpleNamespace(hidden_act=activation, _experts_implementation=implementation))


def routed(num_tokens=7, num_experts_per_token=2, num_ids=3, width=6):
    generator = torch.Generator().manual_seed(4)
    x_TD = torch.randn(num_tokens, width, generator=generator, requires_grad=True)
    expert_TK = torch.rand(num_tokens, num_ids, generator=generator).argsort(dim=1)[:, :num_experts_per_token]
    weight_TK = torch.rand(num_tokens, num_experts_per_token, generator=generator, requires_grad=True)
    return x_TD, expert_TK, weight_TK


def assert_same_step(module, ours, inputs):
    parameters = (inputs[0], inputs[2], *module.parameters())
    outputs = [function(*inputs) for function in (module.forward, ours)]
    direction = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(5))
    theirs, own = (torch.autograd.grad((output * direction).sum(), parameters) for output in outputs)
    assert distance(outputs[1], outputs[0]) <= TOLERANCE
    assert all(distance(a, b) <= TOLERANCE for a, b in zip(own, theirs))


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
    ],
)
def test_activations_are_recognised_and_computed(activation, expected):
    module = own_experts(activation)
    assert gate_form(module) == GateForm(activation=expected)
    assert_same_step(module, lambda *inputs: fastft_experts_forward(module, *inputs), routed())


@pytest.mark.parametrize("activation", ["relu2", "quick_gelu", "mish", "gelu_10"])
def test_other_activations_are_refused(activation):
    with pytest.raises(UnsupportedModelError, match="is unknown"):
        gate_form(own_experts(activation))


def test_a_plain_function_is_an_activation_too():
    module = own_experts()
    del module.act_fn
    module.act_fn = nn.functional.silu
    assert gate_form(module).activation == "silu"


@pytest.mark.parametrize(("name", "is_interleaved"), [("gpt_oss", True), ("minimax_m3_vl_text", False)])
def test_clamped_gates_are_read_with_their_numbers(name, is_interleaved):
    module = experts_of(name)
    for limit, alpha in (("limit", "alpha"), ("swiglu_limit", "swiglu_alpha")):
        if hasattr(module, alpha):
            setattr(module, limit, 0.5)
            setattr(module, alpha, 1.1)
    assert recognise_gate(module) == GateForm(is_interleaved, "clamped", 0.5, 1.1)
    x_TD, expert_TK, weight_TK = routed(width=32, num_ids=4)
    assert_same_step(module, lambda *inputs: fastft_experts_forward(module, *inputs), (x_TD, expert_TK, weight_TK))


def test_a_class_whose_formula_changed_is_not_believed():
    module = experts_of("gpt_oss")
    changed = type(module)._apply_gate
    with (
        mock.patch.object(type(module), "_apply_gate", lambda self, gate_up: changed(self, gate_up) * 1.001),
        pytest.raises(UnsupportedModelError, match="does not match its class"),
    ):
        recognise_gate(module)


def test_an_own_gate_is_not_guessed():
    class OtherExperts(OwnExperts):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return nn.functional.silu(gate.clamp(max=50.0)) * up

    other = OtherExperts(SimpleNamespace(hidden_act="silu", _experts_implementation="eager"))
    with pytest.raises(UnsupportedModelError, match=r"OtherExperts\._apply_gate is an unknown formula"):
        gate_form(other)


def test_ids_of_nobody_count_for_nothing():
    module = own_experts()
    x_TD, expert_TK, weight_TK = routed()
    expert_TK = expert_TK.masked_fill(torch.arange(7)[:, None] % 3 == 0, 3)
    expert_TK[1, 0] = 3
    assert_same_step(module, lambda *inputs: fastft_experts_forward(module, *inputs), (x_TD, expert_TK, weight_TK))
    assert torch.equal(fastft_experts_forward(module, x_TD, expert_TK, weight_TK)[0], torch.zeros(6))


def test_a_norm_behind_each_expert_is_applied_before_the_weights():
    module = own_experts()
    module.post_expert_norm = nn.LayerNorm(6)
    module.has_post_expert_norm = True
    x_TD, expert_TK, weight_TK = routed()
    expert_TK[2, 1] = 3

    def truth(x_TD, expert_TK, weight_TK):
        total = torch.zeros_like(x_TD)
        for place in range(2):
            ones = torch.ones(7, 1)
            single = module.post_expert_norm(OwnExperts.forward(module, x_TD, expert_TK[:, place, None], ones))
            total = total + single * (weight_TK[:, place] * (expert_TK[:, place] < 3))[:, None]
        return total

    with mock.patch.object(module, "forward", truth):
        assert_same_step(module, lambda *inputs: fastft_experts_forward(module, *inputs), (x_TD, expert_TK, weight_TK))


def test_the_norm_of_muse_spark():
    muse = pytest.importorskip(
        "transformers.models.muse_spark.modeling_muse_spark", reason="transformers 5.23 has muse_spark"
    )
    config = SimpleNamespace(
        num_local_experts=3,
        moe_hidden_size=6,
        moe_intermediate_size=5,
        hidden_act="silu",
        post_norm_eps=1e-6,
        _experts_implementation="eager",
    )
    module = muse.MuseSparkExperts(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    # In float64, because fp32 rows of norms are too small for a bound on their gradients.
    x_TD, expert_TK, weight_TK = (
        tensor.detach().double() if tensor.is_floating_point() else tensor for tensor in routed()
    )
    inputs = (x_TD.requires_grad_(), expert_TK, weight_TK.requires_grad_())
    assert_same_step(module.double(), lambda *inputs: fastft_experts_forward(module, *inputs), inputs)


def test_users_choose_the_experts_by_name():
    register_experts()
    register_experts()
    model = build_tiny("qwen3_moe", experts="fastft")
    ours = model(input_ids=token_ids()).logits
    with (
        mock.patch.object(experts, "run_experts", side_effect=RuntimeError("the core")),
        pytest.raises(RuntimeError, match="the core"),
    ):
        model(input_ids=token_ids())
    model.set_experts_implementation("eager")
    assert distance(ours, model(input_ids=token_ids()).logits) <= TOLERANCE


def test_the_output_has_the_dtype_of_the_states():
    module = own_experts().to(torch.bfloat16)
    x_TD, expert_TK, weight_TK = routed()
    assert fastft_experts_forward(module, x_TD, expert_TK, weight_TK).dtype == torch.float32
    assert fastft_experts_forward(module, x_TD.bfloat16(), expert_TK, weight_TK).dtype == torch.bfloat16


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)])])
def test_other_modules_are_not_on_the_interface(module):
    assert not is_on_interface(module)
