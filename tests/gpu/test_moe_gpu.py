"""Routed experts on a CUDA device: as exact as plain bf16, without a host wait, the same bits twice; whole models
under the router.
"""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.kernels.expert_gate.reference import GateForm
from lightning_fastft.moe.expert_linears import ExpertAdapter, ExpertLinear
from lightning_fastft.moe.install import install_bincount_router
from lightning_fastft.moe.routing import run_experts
from tests.moe.test_routing import plain_experts
from tests.support.host_waits import waits_are_errors
from tests.support.packs import make_batch
from tests.support.tiny_models import build_tiny

pytestmark = pytest.mark.gpu
SILU, CLAMPED = GateForm(), GateForm(is_interleaved=True, activation="clamped")
# (experts, per token, width, expert width, form, has biases): Qwen3-30B-A3B and gpt-oss-20b with fewer tokens.
SHAPES = {"qwen3": (128, 8, 2048, 768, SILU, False), "gpt_oss": (32, 4, 2880, 2880, CLAMPED, True)}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def make_layer(shape, *, num_tokens, rank, dtype, skew=0.0):
    """Inputs and trained tensors on the device, by name; a skew sends more tokens to the first tenth of the experts."""
    num_experts, num_chosen, width, inner, form, has_bias = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(*sizes, scale=1.0):
        return (torch.randn(sizes, generator=generator, device="cuda") * scale).to(dtype).requires_grad_()

    def linear(inputs, outputs):
        weight = draw(num_experts, outputs, inputs, scale=inputs**-0.5).detach().transpose(1, 2)
        if form.is_interleaved:
            weight = weight.contiguous()
        bias = draw(num_experts, outputs, scale=0.1).detach() if has_bias else None
        adapter = ExpertAdapter(
            draw(num_experts, inputs, rank, scale=inputs**-0.5), draw(num_experts, rank, outputs, scale=0.1), 1.0
        )
        return ExpertLinear(weight, bias, adapter if rank else None)

    gate_up, down = linear(width, 2 * inner), linear(inner, width)
    scores_TE = torch.randn(num_tokens, num_experts, generator=generator, device="cuda")
    scores_TE[:, : num_experts // 10] += skew
    weight_TK, expert_TK = scores_TE.softmax(1).topk(num_chosen, dim=1)
    inputs = {"x": draw(num_tokens, width), "routing": weight_TK.to(dtype).detach().requires_grad_()}
    for name, product in (("gate_up", gate_up), ("down", down)):
        if product.adapter is not None:
            inputs |= {f"{name}.a": product.adapter.a_EIR, f"{name}.b": product.adapter.b_ERO}
    return inputs, expert_TK, gate_up, down, form, num_experts


def step(function, layer, d_y_TD=None):
    inputs, expert_TK, gate_up, down, form, num_experts = layer
    y_TD = function(
        inputs["x"], expert_TK, inputs["routing"], gate_up=gate_up, down=down, form=form, num_experts=num_experts
    )
    if d_y_TD is None:
        d_y_TD = torch.randn(y_TD.shape, generator=torch.Generator("cuda").manual_seed(2), device="cuda").to(y_TD.dtype)
    gradients = torch.autograd.grad(y_TD, list(inputs.values()), d_y_TD)
    return {"y": y_TD.detach(), **dict(zip(inputs, gradients))}


def widened(layer, dtype):
    """The same layer with every tensor in another dtype."""
    inputs, expert_TK, gate_up, down, form, num_experts = layer
    wide = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}

    def linear(name, product):
        adapter = (
            None
            if product.adapter is None
            else ExpertAdapter(wide[f"{name}.a"], wide[f"{name}.b"], product.adapter.scale)
        )
        return ExpertLinear(
            product.weight_EIO.to(dtype), None if product.bias_EO is None else product.bias_EO.to(dtype), adapter
        )

    return wide, expert_TK, linear("gate_up", gate_up), linear("down", down), form, num_experts


def errors(found, true):
    return {
        name: float((found[name].double() - value.double()).norm() / value.double().norm())
        for name, value in true.items()
    }


@pytest.mark.parametrize("skew", [0.0, 4.0], ids=["balanced", "skewed"])
@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_exact_as_plain_bf16_and_the_same_bits_twice(shape, rank, skew):
    layer = make_layer(shape, num_tokens=512, rank=rank, dtype=torch.bfloat16, skew=skew)
    true = step(plain_experts, widened(layer, torch.float64))
    plain, ours, again = errors(step(plain_experts, layer), true), step(run_experts, layer), step(run_experts, layer)
    for name, error in errors(ours, true).items():
        assert error <= 2 * plain[name], f"{name}: {error:.2e}, plain bf16 {plain[name]:.2e}"
        assert torch.equal(ours[name], again[name]), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_kernels_of_other_devices(dtype):
    """fp16 and fp32 run our own grouped products here, as every dtype does on Ampere and Ada."""
    layer = make_layer("qwen3", num_tokens=128, rank=8, dtype=dtype)
    true = step(plain_experts, widened(layer, torch.float64))
    plain, ours = errors(step(plain_experts, layer), true), errors(step(run_experts, layer), true)
    for name, error in ours.items():
        assert error <= max(2 * plain[name], 2 * torch.finfo(dtype).eps), (
            f"{name}: {error:.2e}, plain {plain[name]:.2e}"
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_the_host_never_waits(shape):
    layer = make_layer(shape, num_tokens=256, rank=16, dtype=torch.bfloat16)
    step(run_experts, layer)
    d_y_TD = torch.randn_like(layer[0]["x"])
    torch.cuda.synchronize()
    with waits_are_errors():
        step(run_experts, layer, d_y_TD)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"])
def test_a_whole_model_is_as_exact_as_plain_bf16(name):
    """LoRA on attention and experts, packed-free batches; truth is fp32 with transformers' eager experts."""
    torch.manual_seed(0)
    base = build_tiny(name, experts="eager")
    config = LoraConfig(r=8, target_modules=["o_proj"], target_parameters=STACKS, init_lora_weights=False)
    wide = get_peft_model(base, config).cuda().train()
    narrow = copy.deepcopy(wide).bfloat16()
    ours = copy.deepcopy(narrow)
    install_bincount_router(ours, ModelPatcher())
    token_BT = torch.randint(3, base.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()

    def run(model):
        model.zero_grad()
        output = model(input_ids=token_BT, labels=token_BT)
        output.loss.backward()
        return {
            "logits": output.logits.detach(),
            **{key: value.grad for key, value in model.named_parameters() if value.grad is not None},
        }

    true, plain, found = run(wide), run(narrow), run(ours)
    assert found.keys() == true.keys()

    def total(results):
        # Routing in bf16 may flip for single tokens in either: the sum over all tensors is compared.
        return (
            sum(
                (results[key].double() - true[key].double()).square().sum()
                / true[key].double().square().sum().clamp(min=1e-30)
                for key in true
            )
            ** 0.5
        )

    assert total(found) <= 2 * total(plain), f"{total(found):.3e}, plain bf16 {total(plain):.3e}"


def test_a_whole_step_never_waits():
    """Packed batch, router, adapters on the experts: forward and backward in training, forward in evaluation."""
    from lightning_fastft.patches.packed import install_packed_training

    torch.manual_seed(0)
    model = (
        get_peft_model(
            build_tiny("qwen3_moe").bfloat16(), LoraConfig(r=8, target_modules=["o_proj"], target_parameters=STACKS)
        )
        .cuda()
        .train()
    )
    patcher = ModelPatcher()
    install_bincount_router(model, patcher)
    install_packed_training(model, patcher)
    batch = make_batch((40, 1, 25, 62)).to(torch.device("cuda"))
    model(**batch).loss.backward()
    torch.cuda.synchronize()
    with waits_are_errors():
        model(**batch).loss.backward()
        with torch.no_grad():
            model.eval()(**batch)


def test_three_steps_with_copies_are_those_without_and_never_wait():
    """fp32 masters on a bf16 base: the same weights to the bit, and the gradients lie in memory as their parameters."""
    from lightning_fastft.fused.low_precision_adapters import install_low_precision_adapters
    from lightning_fastft.patches.packed import install_packed_training

    batch = make_batch((40, 1, 25, 62)).to(torch.device("cuda"))
    arms = []
    for has_copies in (False, True):
        torch.manual_seed(0)
        base = build_tiny("qwen3_moe").bfloat16()
        model = (
            get_peft_model(base, LoraConfig(r=8, target_modules=[], target_parameters=STACKS, init_lora_weights=False))
            .cuda()
            .train()
        )
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert {parameter.dtype for parameter in trained} == {torch.float32}
        patcher = ModelPatcher()
        install_bincount_router(model, patcher)
        # Without a batch context transformers looks for documents in the positions, which waits.
        install_packed_training(model, patcher)
        copies = install_low_precision_adapters(model, patcher, compute_dtype=torch.bfloat16) if has_copies else None
        optimizer = torch.optim.AdamW(trained, lr=1e-2)

        def train(model=model, optimizer=optimizer, copies=copies):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            if copies is not None:
                copies.refresh()

        train()
        torch.cuda.synchronize()
        with waits_are_errors():
            train()
            train()
        assert all(parameter.grad.is_contiguous() for parameter in trained)
        assert copies is None or len(copies) == len(trained)
        arms.append([parameter.detach().clone() for parameter in trained])
    for one, other in zip(*arms):
        assert torch.equal(one, other)
