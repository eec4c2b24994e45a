"""DoRA on a CUDA device: the kernels at the size of a layer, steps as exact as PEFT's in bf16, without a host wait, and
from recorded graphs, over optimizer steps that change no version counter.
"""

import copy

import pytest
import torch

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.kernels.column_scale.op import scale_columns, scale_columns_backward
from lightning_fastft.patches.packed import install_packed_training
from tests.gpu.test_decoder_gpu import make_model
from tests.gpu.test_layer_graphs_gpu import prepare, train
from tests.support.host_waits import waits_are_errors
from tests.support.layer_pairs import add_lora, assert_as_near, step, use_exact_norms
from tests.support.packs import make_batch, relative_error

pytestmark = pytest.mark.gpu
PACKS = ((190, 1, 64, 257), (200, 56, 256), (128,) * 4)


def test_kernels_at_the_size_of_a_layer():
    d_y_TN, saved_TN, addend_TN = (torch.randn(8192, 12288, device="cuda").bfloat16() for _ in range(3))
    factor_N, offset_N = torch.rand(12288, device="cuda") + 0.5, torch.randn(12288, device="cuda")
    # Compile.
    scale_columns(d_y_TN[:1], factor_N, offset_N=offset_N, addend_TN=addend_TN[:1])
    scale_columns_backward(d_y_TN[:1], saved_TN[:1], factor_N, needs_totals=True)
    with waits_are_errors():
        y_TN = scale_columns(d_y_TN, factor_N, offset_N=offset_N, addend_TN=addend_TN)
        first, second = (scale_columns_backward(d_y_TN, saved_TN, factor_N, needs_totals=True) for _ in range(2))
    truth = d_y_TN.double() * factor_N.double()
    assert torch.equal(first[0], (d_y_TN.float() * factor_N).bfloat16())
    assert relative_error(y_TN.double(), truth + offset_N + addend_TN) < 2e-3
    assert relative_error(first[1].double(), (d_y_TN.double() * saved_TN.double()).sum(dim=0)) < 1e-6
    assert relative_error(first[2].double(), d_y_TN.double().sum(dim=0)) < 1e-5
    assert all(torch.equal(one, other) for one, other in zip(first, second))
    assert torch.equal(scale_columns_backward(d_y_TN, saved_TN, factor_N, out=d_y_TN)[0], first[0])


def dora_model():
    """Magnitudes that are no row norms, fp32 adapters on a bf16 base."""
    torch.manual_seed(0)
    model = add_lora(
        make_model("qwen3", has_lora=False).requires_grad_(False), r=16, use_dora=True, adapter_dtype=torch.float32
    ).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    return model


@pytest.mark.slow(10)
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_a_step_is_as_near_to_the_truth_as_pefts_and_waits_for_nothing(policy):
    model, batch = dora_model(), make_batch(PACKS[0])
    truth = copy.deepcopy(model).double()
    install_packed_training(truth, ModelPatcher())
    use_exact_norms(truth, is_plain=True)
    own = copy.deepcopy(model).to("cuda")
    install_packed_training(own, ModelPatcher())
    ours, copies, _ = prepare(model, policy=policy, is_recorded=False)
    on_device = batch.to("cuda")
    step(ours, on_device)
    with waits_are_errors():
        copies.refresh()
        loss = ours(**on_device).loss
        loss.backward()
    ours.zero_grad(set_to_none=True)
    found, expected = ({name: value.cpu() for name, value in step(each, on_device).items()} for each in (ours, own))
    assert_as_near(found, own=expected, truth=step(truth, batch))


@pytest.mark.slow(20)
@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_recorded_layers_see_what_a_step_has_changed(policy):
    model = dora_model()
    batches = [make_batch(PACKS[number % 3], seed=number % 3).to("cuda") for number in range(9)]
    recorded, copies, graphs = prepare(model, policy=policy, is_recorded=True)
    found = train(recorded, copies, batches, rate=0.05)
    assert graphs.num_replays > 0, graphs.reasons
    moving, standing = (
        train(*prepare(model, policy=policy, is_recorded=False)[:2], batches, rate=rate) for rate in (0.05, 0.0)
    )
    for name in (name for name in moving[-1] if "lora_B" in name or "magnitude" in name):
        assert relative_error(found[-1][name], moving[-1][name]) <= 0.1 * relative_error(
            standing[-1][name], moving[-1][name]
        ), name
