"""After a run the model is what it was before: however the run ends, at whichever hook, whoever installed what."""

import os
import signal
import threading

import lightning.pytorch as pl
import pytest
import torch
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from lightning_fastft import (
    BincountRouter,
    FineTuner,
    FiniteGuard,
    FusedKernels,
    HostWaitDetector,
    OffloadCheckpointing,
    PackedTraining,
    RunReport,
    Watchdog,
)
from lightning_fastft.checkpoint.stops import STOP_SIGNALS, StopSignals
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.support.processes import children_of
from tests.support.sizes import sizes
from tests.support.token_weighting_worker import CONFIG
from tests.support.training_parts import VOCAB_SIZE, PlainModule, packed_loader, quiet_trainer, tiny_llama

pytestmark = pytest.mark.covering

HOOKS = (
    "setup",
    "on_fit_start",
    "on_sanity_check_start",
    "on_validation_batch_end",
    "on_train_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "teardown",
)
MODULE_HOOKS = ("configure_optimizers", "training_step", "validation_step", "on_train_epoch_end", "teardown")


@pytest.fixture(autouse=True)
def handlers_of_lightning():
    """Lightning restores its signal handlers unless a callback fails twice."""
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class PlantedError(Exception):
    pass


class RaiseAt(pl.Callback):
    """Ends the run at a hook."""

    def __init__(self, hook, error=PlantedError):
        def end(*args, **kwargs):
            raise error

        setattr(self, hook, end)


def describe(model, *, is_moved=False):
    """All that a run may change and must give back, by the place where it is.

    Weights that were streamed come back to other memory: with is_moved their values count, and not their addresses.
    """
    found = {}
    for name, module in model.named_modules():
        attributes = sorted(set(vars(module)) - {"training"})
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("_hooks") and value is not None}
        found[name] = (type(module), attributes, hooks, type(vars(module).get("forward")))
        if hasattr(module, "config"):
            found[f"{name}.config"] = (
                module.config._attn_implementation,
                getattr(module.config, "_experts_implementation", None),
            )
    for name, parameter in model.named_parameters():
        attributes = sorted(vars(parameter))
        found[name] = (
            type(parameter),
            parameter.dtype,
            parameter.stride(),
            float(parameter.float().sum()) if is_moved and not parameter.requires_grad else parameter.data_ptr(),
            parameter.requires_grad,
            attributes,
            parameter._backward_hooks,
        )
    return found


def tiny_mixture():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **sizes(vocab=VOCAB_SIZE, width=32, inner=48, layers=2, heads=4, key_heads=2, head_width=8, positions=256),
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config).train()


def adapted(dtype):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(
        tiny_llama().to(dtype), LoraConfig(r=2, target_modules="all-linear"), autocast_adapter_dtype=False
    ).train()


WAYS = {
    "own module": lambda: PlainModule(tiny_llama()),
    "own module, experts": lambda: PlainModule(tiny_mixture()),
    "own module, PEFT": lambda: PlainModule(adapted(torch.float32)),
    "FineTuner of a model, bf16 and fp32 adapters": lambda: FineTuner(
        tiny_llama().to(torch.bfloat16),
        lora={"r": 2, "target_modules": "all-linear"},
        dtype="bfloat16",
        scheduler="constant",
    ),
}
SETUPS = {
    "strategy, all": lambda: {
        "strategy": FastFTStrategy(activations=OffloadCheckpointing("recompute")),
        "callbacks": [FusedKernels(), BincountRouter()],
    },
    "strategy, plain": lambda: {"strategy": FastFTStrategy(activations=OffloadCheckpointing("keep")), "callbacks": []},
    "PackedTraining": lambda: {
        "callbacks": [PackedTraining(activations=OffloadCheckpointing("recompute")), FusedKernels(), BincountRouter()]
    },
}


FEATURES = {
    "offload, fp8, graphs": lambda: {
        "strategy": FastFTStrategy(activations=OffloadCheckpointing("offload", host_budget=1.0)),
        "callbacks": [FusedKernels(cuda_graphs=True, base_compute="fp8_reference"), BincountRouter()],
    },
    "streamed weights": lambda: {
        "strategy": FastFTStrategy(activations=OffloadCheckpointing("recompute", weights="stream")),
        "callbacks": [FusedKernels(), BincountRouter()],
    },
}
ADAPTED = {
    "own module, PEFT": WAYS["own module, PEFT"],
    "FineTuner, NF4 experts": lambda: FineTuner(
        {**tiny_mixture().config.to_dict(), "architectures": None},
        init="random",
        quantization="nf4",
        lora={"r": 2},
        dtype="bfloat16",
        tokenizer=None,
        scheduler="constant",
    ),
}


def run(tmp_path, module, setup, *, end):
    """Fit until end raises; the model as it was found by the first hook that has it whole, and as it is left."""
    # An error in a validation leaves the model in evaluation mode, under any strategy.
    module.train()
    options = {**SETUPS, **FEATURES}[setup]()
    trainer = quiet_trainer(
        tmp_path, **options | {"callbacks": [*options["callbacks"], *end]}, num_sanity_val_steps=1, max_epochs=1
    )
    trainer.fit(module, packed_loader(4), packed_loader(2, seed=9))


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("way", WAYS)
def test_normal_end_and_error_at_every_hook(tmp_path, way, setup):
    module = WAYS[way]()
    if way.startswith("FineTuner"):
        # Builds its adapters in the first run: what that leaves is what later ones find.
        run(tmp_path, module, setup, end=[])
        assert not [
            name for name, part in module.model.named_modules() if type(part).__module__.startswith("lightning_fastft")
        ]
        assert not [key for part in module.model.modules() for key in vars(part) if "fastft" in key]
    before = describe(module.model)
    run(tmp_path, module, setup, end=[])
    assert describe(module.model) == before
    for hook in HOOKS:
        with pytest.raises(PlantedError):
            run(tmp_path, module, setup, end=[RaiseAt(hook)])
        assert describe(module.model) == before, hook


@pytest.mark.parametrize("setup", FEATURES)
@pytest.mark.parametrize("way", ADAPTED)
def test_features_leave_nothing_at_any_hook(tmp_path, way, setup):
    module = ADAPTED[way]()
    run(tmp_path, module, setup, end=[])
    is_moved = setup == "streamed weights"
    before = describe(module.model, is_moved=is_moved)
    for hook in HOOKS:
        with pytest.raises(PlantedError):
            run(tmp_path, module, setup, end=[RaiseAt(hook)])
        assert describe(module.model, is_moved=is_moved) == before, hook


class FailsTwice(RaiseAt):
    """Ends the run, and raises again where it is told of that."""

    def on_exception(self, *args):
        raise ValueError


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("way", WAYS)
def test_error_in_a_callback_that_is_told_of_an_error(tmp_path, way, setup):
    module = WAYS[way]()
    run(tmp_path, module, setup, end=[])
    before = describe(module.model)
    with pytest.raises(ValueError):  # noqa: PT011 - planted above
        run(tmp_path, module, setup, end=[FailsTwice("on_train_batch_end")])
    assert describe(module.model) == before


def describe_process():
    """What a run may change outside of its model; handlers of Lightning do not count."""
    handlers = [signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGINT)]
    return {
        "handlers": [handler for handler in handlers if isinstance(getattr(handler, "__self__", None), StopSignals)],
        "threads": {thread.name for thread in threading.enumerate()},
        "processes": children_of(os.getpid()),
        "methods": (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu),
        "modes": _len_torch_dispatch_stack(),
        "is profiled": torch.autograd._profiler_enabled(),
    }


@pytest.mark.parametrize("end", [FailsTwice, RaiseAt])
def test_nothing_stays_in_the_process_after_an_error(tmp_path, end):
    before = describe_process()
    report = RunReport(path=tmp_path / "a.html", profile_step=0)
    guard = FiniteGuard(unsupported="wait")
    callbacks = [end("on_train_batch_end"), Watchdog(), HostWaitDetector(steps=[0, 1]), report, guard]
    trainer = quiet_trainer(tmp_path, strategy=FastFTStrategy(), callbacks=callbacks)
    with pytest.raises((ValueError, PlantedError)):
        trainer.fit(PlainModule(tiny_llama()), packed_loader(4))
    assert describe_process() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("way", WAYS)
def test_interrupted_run(tmp_path, way, error):
    module = WAYS[way]()
    run(tmp_path, module, "strategy, all", end=[])
    before = describe(module.model)
    with pytest.raises(SystemExit):
        run(tmp_path, module, "strategy, all", end=[RaiseAt("on_train_batch_end", error)])
    assert describe(module.model) == before


@pytest.mark.parametrize("hook", MODULE_HOOKS)
@pytest.mark.parametrize("way", ["own module", "FineTuner of a model, bf16 and fp32 adapters"])
def test_error_in_a_hook_of_the_module(tmp_path, way, hook, monkeypatch):
    module = WAYS[way]()
    run(tmp_path, module, "strategy, all", end=[])
    before = describe(module.model)

    def end(*args, **kwargs):
        raise PlantedError

    monkeypatch.setattr(module, hook, end)
    with pytest.raises(PlantedError):
        run(tmp_path, module, "strategy, all", end=[])
    assert describe(module.model) == before


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_evaluation_that_fails(tmp_path, verb):
    module = WAYS["FineTuner of a model, bf16 and fp32 adapters"]()
    run(tmp_path, module, "strategy, plain", end=[])
    before = describe(module.model)
    trainer = quiet_trainer(
        tmp_path,
        strategy="fastft",
        callbacks=[FusedKernels(), RaiseAt(f"on_{'validation' if verb == 'validate' else verb}_batch_end")],
    )
    with pytest.raises(PlantedError):
        getattr(trainer, verb)(module, packed_loader(2))
    assert describe(module.model) == before


def test_model_that_cannot_be_built_leaves_nothing(tmp_path):
    module = FineTuner({**CONFIG, "vocab_size": VOCAB_SIZE}, init="random", lora={"r": 2}, dtype="bfloat16")
    module.register_transform("broken", lambda model: (_ for _ in ()).throw(PlantedError), stage="after_adapters")
    with pytest.raises(PlantedError):
        run(tmp_path, module, "strategy, plain", end=[])
    assert not [part for part in module.modules() if type(part).__name__ == "LoraLinear"]
