import copy
import warnings

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn

from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused import low_precision_adapters as adapters
from lightning_fastft.fused.low_precision_adapters import LoraLinear, install_low_precision_adapters
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.truth import assert_within_bound

WIDTH, NUM_OUTPUTS, NUM_TOKENS = 24, 20, 37


class Net(nn.Module):
    """Two adapted layers around a nonlinearity."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, NUM_OUTPUTS)
        self.second = nn.Linear(NUM_OUTPUTS, WIDTH, bias=False)

    def forward(self, x, **kwargs):
        return self.second(torch.tanh(self.first(x)))


def build_net(dtype=torch.bfloat16, **config):
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["first", "second"], "init_lora_weights": False, **config}
    return get_peft_model(Net().to(dtype), LoraConfig(**config)).train()


def install(model, compute_dtype=torch.bfloat16):
    patcher = ModelPatcher()
    return install_low_precision_adapters(model, patcher, compute_dtype=compute_dtype), patcher


def make_x(dtype=torch.bfloat16):
    return torch.randn(2, NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def run(model, x, *, seed=3):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    out = model(x)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = torch.autograd.grad(out, [x, *trained.values()], d_out)
    return {"out": out.detach(), **dict(zip(["x", *trained], gradients))}


@pytest.fixture
def calls(monkeypatch):
    """Counts how often the fast path ran."""
    counted = []
    original = adapters.lora_addmm
    monkeypatch.setattr(adapters, "lora_addmm", lambda *args, **kwargs: counted.append(1) or original(*args, **kwargs))
    return counted


def assert_equal_results(expected, ours):
    assert expected.keys() == ours.keys()
    for name in expected:
        assert torch.equal(expected[name], ours[name]), name


def test_results_are_as_near_to_the_truth_as_plain_bf16_and_gradients_are_fp32(calls):
    layer = get_peft_model(
        nn.Sequential(nn.Linear(WIDTH, NUM_OUTPUTS)).bfloat16(),
        LoraConfig(r=4, target_modules=["0"], init_lora_weights=False),
    )
    assert {parameter.dtype for name, parameter in layer.named_parameters() if "lora" in name} == {torch.float32}
    with torch.no_grad():
        # Masters that are bf16 numbers: the truth is the same for every arm.
        for name, parameter in layer.named_parameters():
            if "lora" in name:
                parameter.copy_(parameter.bfloat16())
    x = make_x()
    truth = run(copy.deepcopy(layer).double(), x.detach().double().requires_grad_())
    plain = run(copy.deepcopy(layer).bfloat16(), x)
    peft = run(layer, x)
    install(layer)
    ours = run(layer, x)
    assert len(calls) == 1
    for name, true in truth.items():
        assert_within_bound(name, ours[name], plain=plain[name], truth=true, dtype=torch.bfloat16)
        assert ours[name].dtype is peft[name].dtype, name


def test_peft_and_ours_differ_by_the_rounding_of_bf16_only():
    model = build_net()
    expected = run(model, make_x())
    install(model)
    ours = run(model, make_x())
    for name in expected:
        assert (ours[name].double() - expected[name].double()).norm() <= 2e-2 * expected[name].double().norm(), name


def test_a_wrong_copy_is_seen(monkeypatch):
    # The teeth of the comparison above.
    model = build_net()
    expected = run(model, make_x())
    copies, _ = install(model)
    read = copies.read
    monkeypatch.setattr(copies, "read", lambda linear: read(linear) * 1.1)
    ours = run(model, make_x())
    assert any(
        (ours[name].double() - expected[name].double()).norm() > 2e-2 * expected[name].double().norm()
        for name in expected
    )


def test_dropout_drops_the_same_tokens_as_peft(calls):
    model = build_net(lora_dropout=0.5)
    expected = run(model, make_x())
    install(model)
    ours = run(model, make_x())
    assert len(calls) == 2
    assert (ours["out"] - expected["out"]).double().norm() <= 2e-2 * expected["out"].double().norm()
    assert not torch.equal(ours["out"], run(model, make_x(), seed=4)["out"])


def test_parameters_names_and_optimizer_see_the_masters():
    model = build_net()
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    copies, _ = install(model)
    run(model, make_x())
    assert len(copies) == 4
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(one is other for one, other in zip(model.parameters(), parameters.values()))
    assert list(model.state_dict()) == keys
    assert not any("copy" in name for name, _ in model.named_buffers())
    assert type(model.base_model.model.first) is LoraLinear
    assert isinstance(model.base_model.model.first, PeftLinear)
    assert copies.status.state == "active"
    assert "2 LoRA layers" in copies.status.reason


@pytest.mark.parametrize(
    ("optimizer", "is_refreshed"),
    [
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True), False),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), False),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), True),
        # A fused step leaves the version counters as they are (seen on torch 2.13).
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True), True),
    ],
)
def test_a_step_reaches_the_next_forward(optimizer, is_refreshed):
    model, x = build_net(), make_x()
    copies, _ = install(model)
    stepper = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    for _ in range(3):
        stepper.zero_grad()
        model(x).float().square().mean().backward()
        stepper.step()
        if is_refreshed:
            copies.refresh()
    fresh = copy.deepcopy(model)
    for linear in fresh.modules():
        vars(linear).pop("fastft_copy", None)
    assert torch.equal(model(x), fresh(x))


def test_a_change_that_no_counter_sees_needs_the_refresh():
    model, x = build_net(), make_x()
    copies, _ = install(model)
    before = model(x)
    model.base_model.model.first.lora_B["default"].weight.data.add_(1.0)
    assert torch.equal(model(x), before)
    copies.refresh()
    assert not torch.equal(model(x), before)


@pytest.mark.parametrize("change", ["in place", "load_state_dict", "new parameter", "data replaced", "moved"])
def test_every_change_that_the_host_can_see_is_followed(change):
    model, x = build_net(), make_x()
    install(model)
    before = model(x)
    linear = model.base_model.model.first.lora_B["default"]
    new = linear.weight.detach() + 1.0
    if change == "in place":
        with torch.no_grad():
            linear.weight.add_(1.0)
    elif change == "load_state_dict":
        model.load_state_dict({**model.state_dict(), "base_model.model.first.lora_B.default.weight": new})
    elif change == "new parameter":
        linear.weight = nn.Parameter(new)
    elif change == "data replaced":
        linear.weight.data = new
    else:
        linear.weight.data = new.to(torch.float64)
    after = model(x)
    assert not torch.equal(after, before)
    with torch.no_grad():
        linear.weight.data = linear.weight.data.float() - 1.0
    torch.testing.assert_close(model(x), before, rtol=2e-2, atol=2e-2)


def test_a_first_forward_in_inference_mode_can_be_trained_on():
    model, x = build_net(), make_x()
    install(model)
    with torch.inference_mode():
        model(x.detach())
        with torch.no_grad():
            model.base_model.model.first.lora_B["default"].weight.add_(1.0)
        model(x.detach())
    model(x).float().sum().backward()
    assert model.base_model.model.first.lora_B["default"].weight.grad is not None


def use_two_adapters(model):
    model.add_adapter("other", LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "other"])


FALLBACKS = {
    "merged": lambda model: model.merge_adapter(),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "two active adapters": use_two_adapters,
    "hook on lora_A": lambda model: (
        model.base_model.model.first.lora_A["default"].register_forward_hook(lambda *args: 2 * args[2])
        and model.base_model.model.second.lora_A["default"].register_forward_pre_hook(lambda *args: None)
    ),
    "casting turned off": lambda model: (
        [
            setattr(model.base_model.model.get_submodule(name), "cast_input_dtype_enabled", False)
            for name in ("first", "second")
        ]
        and [module.float() for module in (model,)]
    ),
}


@pytest.mark.parametrize("case", FALLBACKS)
def test_what_is_not_plain_lora_runs_pefts_own_forward(case, calls):
    arms = [build_net(), build_net()]
    install(arms[1])
    outs = []
    for model in arms:
        torch.manual_seed(5)
        FALLBACKS[case](model)
        outs.append(model(make_x(next(model.parameters()).dtype)))
    assert torch.equal(*outs)
    assert calls == []


@pytest.mark.parametrize("config", [{"use_dora": True, "lora_dropout": 0.1}, {"lora_bias": True}])
def test_variants_of_lora_run_pefts_own_forward(config, calls):
    arms = [build_net(**config), build_net(**config)]
    status = install(arms[1])[0].status
    assert (status.state, "PEFT's own forward" in status.reason) == ("inactive", True)
    assert_equal_results(*(run(model, make_x()) for model in arms))
    assert calls == []


def test_mixed_batches_and_autocast_run_pefts_own_forward(calls):
    arms = [build_net(), build_net()]
    install(arms[1])
    outs = []
    for model in arms:
        model.eval()
        torch.manual_seed(5)
        model.add_adapter("other", LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False))
        outs.append(model(make_x(), adapter_names=["default", "other"]))
    assert torch.equal(*outs)
    arms = [build_net(torch.float32), build_net(torch.float32)]
    install(arms[1])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(*(model(make_x(torch.float32)) for model in arms))
    assert torch.equal(*(model(make_x(torch.float32)) for model in arms))
    assert calls == []


def test_switching_adding_and_deleting_adapters_works_as_in_peft(calls):
    model, x = build_net(), make_x()
    copies, _ = install(model)
    first = model(x)
    torch.manual_seed(7)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["first", "second"], init_lora_weights=False))
    model.set_adapter("other")
    second = model(x)
    assert not torch.equal(first, second)
    model.set_adapter("default")
    assert torch.equal(model(x), first)
    assert len(calls) == 6
    assert len(copies) == 8
    with model.disable_adapter():
        plain = model(x)
    assert torch.equal(
        plain, model.get_base_model().second.base_layer(torch.tanh(model.get_base_model().first.base_layer(x)))
    )
    model.delete_adapter("other")
    assert len(copies) == 4
    copies.refresh()
    assert torch.equal(model(x), first)


def test_merge_and_unload_gives_pefts_own_result():
    arms = [build_net(), build_net()]
    install(arms[1])
    run(arms[1], make_x())
    merged = [model.merge_and_unload() for model in arms]
    assert_equal_results(*(model.state_dict() for model in merged))
    assert all(type(model.first) is nn.Linear for model in merged)


def test_saved_adapters_are_pefts_own_files(tmp_path):
    model, x = build_net(), make_x()
    expected = model(x)
    model.save_pretrained(tmp_path / "plain")
    install(model)
    ours = model(x)
    model.save_pretrained(tmp_path / "ours")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "ours" / name).read_bytes()
    torch.manual_seed(0)
    reloaded = PeftModel.from_pretrained(Net().bfloat16(), tmp_path / "ours", is_trainable=True)
    assert torch.equal(reloaded(x), expected)
    model.load_adapter(str(tmp_path / "plain"), "again", is_trainable=True)
    model.set_adapter("again")
    assert torch.equal(model(x), ours)


def test_undo_restores_everything():
    model, x = build_net(), make_x()
    before = {name: (type(module), set(vars(module))) for name, module in model.named_modules()}
    expected = run(model, x)
    _, patcher = install(model)
    run(model, x)
    patcher.undo()
    assert {name: (type(module), set(vars(module))) for name, module in model.named_modules()} == before
    assert_equal_results(expected, run(model, x))


def test_a_copy_of_the_model_has_copies_of_its_own():
    model, x = build_net(), make_x()
    install(model)
    expected = model(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.base_model.model.first.lora_B["default"].weight.add_(1.0)
    assert not torch.equal(twin(x), expected)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("build", "compute_dtype", "word"),
    [
        (lambda: build_net(), torch.float32, "dtype they are held in"),
        (lambda: build_net().bfloat16(), torch.bfloat16, "dtype they are held in"),
        (lambda: Net(), torch.bfloat16, "no LoRA layers"),
        (
            lambda: get_peft_model(nn.ModuleDict({"e": nn.Embedding(5, 4)}), LoraConfig(target_modules=["e"])),
            torch.bfloat16,
            "1 Embedding",
        ),
    ],
)
def test_where_no_copy_is_needed_nothing_is_changed(build, compute_dtype, word):
    model = build()
    types = [type(module) for module in model.modules()]
    copies, patcher = install(model, compute_dtype)
    assert copies.status.state == "inactive"
    assert word in copies.status.reason
    assert [type(module) for module in model.modules()] == types
    assert len(patcher) == len(copies) == 0
    copies.refresh()


def test_a_whole_number_dtype_is_refused():
    with pytest.raises(OptionError, match="int8"):
        install(build_net(), torch.int8)


def test_a_model_trains_with_checkpointing_as_without():
    results = []
    for is_checkpointed in (False, True):
        model = get_peft_model(
            build_tiny("llama").bfloat16(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        ).train()
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(parameter, std=0.1)
        copies, _ = install(model)
        assert "14 LoRA layers" in copies.status.reason
        if is_checkpointed:
            model.get_base_model()._set_gradient_checkpointing(
                enable=True,
                gradient_checkpointing_func=lambda function, *args: torch.utils.checkpoint.checkpoint(
                    function, *args, use_reentrant=False
                ),
            )
        ids = torch.arange(40)[None] % VOCABULARY
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        results.append(
            {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        )
    assert_equal_results(*results)
    assert all(gradient.dtype is torch.float32 for gradient in results[0].values())


def test_distributed_data_parallel_reduces_the_masters(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, x = build_net(), make_x()
        copies, _ = install(model)
        expected = run(model, x)
        wrapped = nn.parallel.DistributedDataParallel(model)
        d_out = torch.randn(expected["out"].shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
        wrapped(x).backward(d_out)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert torch.equal(parameter.grad, expected[name]), name
        assert len(copies) == 4
    finally:
        torch.distributed.destroy_process_group()


class TestQuantised:
    """bitsandbytes on a CPU: only in training mode with gradients, an evaluation repacks the weight in place."""

    @staticmethod
    def build(kind):
        bitsandbytes = pytest.importorskip("bitsandbytes")
        torch.manual_seed(0)
        if kind == "Linear4bit":
            base = bitsandbytes.nn.Linear4bit(
                64, 128, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", quant_storage=torch.uint8
            )
        else:
            base = bitsandbytes.nn.Linear8bitLt(64, 128, bias=False, has_fp16_weights=False, threshold=6.0)
        base.load_state_dict({"weight": torch.randn(128, 64)})
        net = nn.ModuleDict({"layer": base}).to("cpu")
        net.is_loaded_in_4bit, net.is_loaded_in_8bit = kind == "Linear4bit", kind == "Linear8bitLt"
        config = LoraConfig(r=4, target_modules=["layer"], init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return get_peft_model(net, config).train()

    @pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
    def test_a_quantised_base_is_served(self, kind, calls):
        model = self.build(kind)
        layer = model.base_model.model["layer"]
        assert type(layer).__name__ == kind
        assert layer.lora_A["default"].weight.dtype is torch.float32
        x = torch.randn(2, 9, 64).bfloat16().requires_grad_()
        trained = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        out = layer(x)
        d_out = torch.randn(out.shape).bfloat16()
        expected = [out.detach(), *torch.autograd.grad(out, [x, *trained], d_out)]
        keys = list(model.state_dict())
        copies, patcher = install(model)
        assert copies.status.state == "active"
        layer = model.base_model.model["layer"]
        out = layer(x)
        ours = [out.detach(), *torch.autograd.grad(out, [x, *trained], d_out)]
        assert len(calls) == 1
        assert list(model.state_dict()) == keys
        for one, other in zip(expected, ours):
            assert one.dtype is other.dtype
            assert (one.double() - other.double()).norm() <= 2e-2 * one.double().norm()
        patcher.undo()
        assert type(model.base_model.model["layer"]).__name__ == kind
