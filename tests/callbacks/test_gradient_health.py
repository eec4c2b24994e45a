"""GradientHealth: every way of not training is named, and nothing else raises an alarm."""

import json
import warnings

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from peft import LoraConfig, get_peft_model
from torch import nn

from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.callbacks.packed_training import PackedTraining
from lightning_fastft.core.errors import NotTrainingError
from lightning_fastft.optim import FusedAdamW
from lightning_fastft.strategies.registry import register_strategies
from tests.support.training_parts import PlainModule, packed_batches, packed_loader, quiet_trainer, tiny_llama
from tests.support.two_ranks import run_two_ranks

register_strategies()


def fit(tmp_path, module, *, health=None, num_batches=6, loader=None, **options):
    health = health or GradientHealth(num_steps=4)
    trainer = quiet_trainer(
        tmp_path, **{"strategy": "fastft", "callbacks": [health], "max_steps": num_batches, **options}
    )
    trainer.fit(module, loader or packed_loader(num_batches))
    return health


def lora_llama():
    return get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))


class WithSchedule(PlainModule):
    """A learning rate that follows a list, one entry per optimizer step."""

    def __init__(self, model, rates):
        super().__init__(model)
        self.rates = rates

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self.rates[min(step, len(self.rates) - 1)])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


# No alarm where there is none.


@pytest.mark.covering
@pytest.mark.parametrize("make_model", [tiny_llama, lora_llama], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", ["fastft", "ddp"])
def test_healthy_run_is_judged_and_left_in_peace(tmp_path, make_model, strategy):
    module = PlainModule(make_model())
    health = GradientHealth(num_steps=4)
    callbacks = [health] if strategy == "fastft" else [health, PackedTraining()]
    fit(tmp_path, module, strategy=strategy, callbacks=callbacks)
    assert health.status().state == "active"
    assert "moved within 4 steps" in health.status().reason


def test_lora_whose_a_has_no_gradient_in_the_first_step(tmp_path):
    health = GradientHealth(num_steps=3)
    fit(tmp_path, PlainModule(lora_llama()), health=health, num_batches=3)
    assert "moved" in health.status().reason


def test_warm_up_from_zero(tmp_path):
    health = fit(tmp_path, WithSchedule(tiny_llama(), [0.0, 0.0, 0.0, 0.1, 0.5, 1.0]), num_batches=8)
    assert "moved" in health.status().reason


def test_batches_without_labels(tmp_path):
    batches = packed_batches(3, has_labels=False) + packed_batches(5)
    health = fit(
        tmp_path, PlainModule(tiny_llama()), num_batches=8, loader=torch.utils.data.DataLoader(batches, batch_size=None)
    )
    assert "moved" in health.status().reason


def test_skipped_steps(tmp_path):
    class Skips(PlainModule):
        def training_step(self, batch, batch_idx):
            return None if batch_idx in (1, 2) else super().training_step(batch, batch_idx)

    # Counted as judged, the skipped steps would end the judgement before LoRA's A has its first gradient.
    health = fit(tmp_path, Skips(lora_llama()), health=GradientHealth(num_steps=3), num_batches=8)
    assert "moved within 3 steps" in health.status().reason


def test_windows_of_accumulation_with_some_micro_batches_empty(tmp_path):
    batches = [batch for pair in zip(packed_batches(6), packed_batches(6, has_labels=False)) for batch in pair]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    health = fit(tmp_path, PlainModule(tiny_llama()), num_batches=6, loader=loader, accumulate_grad_batches=2)
    assert "moved" in health.status().reason


def test_tied_weights_are_counted_once(tmp_path):
    model = tiny_llama()
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    health = fit(tmp_path, PlainModule(model))
    num_tensors = len({id(parameter) for parameter in model.parameters()})
    assert health.status().reason.startswith(f"{num_tensors} tensors moved")


@pytest.mark.parametrize("is_fused", [False, True])
def test_steps_that_a_gradient_scaler_skips_are_not_judged(tmp_path, is_fused):
    class Scaled(PlainModule):
        def training_step(self, batch, batch_idx):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0, fused=is_fused)

    # So large a scale overflows fp16 in the first steps, and the scaler backs off.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-12)
    module, health = Scaled(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))), GradientHealth(num_steps=4)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    loader = torch.utils.data.DataLoader(torch.randn(10, 2, 4), batch_size=None)
    fit(tmp_path, module, health=health, num_batches=10, loader=loader, max_steps=-1, max_epochs=1, plugins=plugins)
    assert scaler.get_scale() < 2.0**40
    assert "moved" in health.status().reason


def test_group_with_a_rate_of_zero_is_reported_not_refused(tmp_path):
    class TwoGroups(PlainModule):
        def configure_optimizers(self):
            head = [self.model.lm_head.weight]
            rest = [parameter for parameter in self.parameters() if parameter is not head[0]]
            return torch.optim.AdamW([{"params": head, "lr": 0.0}, {"params": rest, "lr": 1e-2}], weight_decay=0.0)

    with pytest.warns(UserWarning, match=r"learning rate of 0.*lm_head"):
        health = fit(tmp_path, TwoGroups(tiny_llama()))
    assert "moved" in health.status().reason


class UnusedExpert(PlainModule):
    def __init__(self, model):
        super().__init__(model)
        self.experts = nn.ModuleList([nn.Linear(3, 3)])


def test_tensors_that_may_stay_without_gradient(tmp_path):
    health = fit(tmp_path, UnusedExpert(tiny_llama()), health=GradientHealth(num_steps=4, allow_zero=["experts.*"]))
    assert "moved" in health.status().reason


def test_short_run_is_only_noted(tmp_path):
    with pytest.warns(UserWarning, match="checked nothing"):
        fit(tmp_path, PlainModule(tiny_llama()), num_batches=2)


# Teeth.


def test_nothing_trainable(tmp_path):
    class Frozen(PlainModule):
        def configure_optimizers(self):
            return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    with pytest.raises(NotTrainingError, match="no trainable tensor"):
        fit(tmp_path, Frozen(tiny_llama().requires_grad_(False)))


def test_trainable_tensor_outside_the_optimizer(tmp_path):
    class Forgets(PlainModule):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.model.lm_head.parameters(), lr=1e-2)

    with pytest.raises(NotTrainingError, match=r"in no optimizer.*embed_tokens"):
        fit(tmp_path, Forgets(tiny_llama()))


def test_detached_adapter_has_no_gradient(tmp_path):
    with pytest.raises(
        NotTrainingError,
        match=r"2 of .* did not train in 4 steps: 2 never had a gradient \(experts\.0\.weight, experts\.0\.bias\)",
    ):
        fit(tmp_path, UnusedExpert(tiny_llama()))


def test_loss_detached_from_the_decoder(tmp_path):
    class Detached(PlainModule):
        def training_step(self, batch, batch_idx):
            state = self.model.model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False, context=batch.context
            )[0]
            return nn.functional.cross_entropy(
                self.model.lm_head.weight.matmul(state[0, :-1].detach().T).T, batch["input_ids"][0, 1:]
            )

    with pytest.raises(NotTrainingError, match="never had a gradient"):
        fit(tmp_path, Detached(tiny_llama()))


def test_gradient_of_exactly_zero(tmp_path):
    class CutOff(PlainModule):
        def on_after_backward(self):
            self.model.model.layers[1].mlp.up_proj.weight.grad.zero_()

    with pytest.raises(
        NotTrainingError,
        match=r"1 only had gradients of exactly zero \(model\.model\.layers\.1\.mlp\.up_proj\.weight\)",
    ):
        fit(tmp_path, CutOff(tiny_llama()))


def test_tensor_that_is_put_back_does_not_move(tmp_path):
    class PutsBack(PlainModule):
        def on_train_start(self):
            self.kept = self.model.lm_head.weight.detach().clone()
            optimizer = self.trainer.optimizers[0]
            optimizer.register_step_post_hook(lambda *_: self.model.lm_head.weight.data.copy_(self.kept))

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            optimizer.register_step_post_hook(lambda *_: self.model.lm_head.weight.data.copy_(self.kept))
            return optimizer

    with pytest.raises(NotTrainingError, match=r"1 had gradients and did not move \(model\.lm_head\.weight\)"):
        fit(tmp_path, PutsBack(tiny_llama()))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradient_that_is_not_finite_stops_at_once(tmp_path, value):
    class Breaks(PlainModule):
        def on_after_backward(self):
            if self.global_step == 1:
                self.model.lm_head.weight.grad[3, 5] = value

    module = Breaks(tiny_llama())
    with pytest.raises(NotTrainingError, match=r"not finite.* in optimizer step 2 .*1 of .*lm_head") as error:
        fit(tmp_path, module)
    assert "checkpoint" in str(error.value)
    assert module.trainer.global_step == 2


class HugeValue(PlainModule):
    """Training whose gradients hold one finite value that is too large to be squared, from the second step on."""

    def __init__(self, model, make, value=3e38):
        super().__init__(model)
        self.make, self.value = make, value

    def on_after_backward(self):
        if self.global_step == 1:
            self.model.lm_head.weight.grad[3, 5] = self.value

    def configure_optimizers(self):
        return self.make(list(self.parameters()))


def adamw_8bit(params):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(params, lr=1e-3, min_8bit_size=16)


@pytest.mark.parametrize(
    ("make", "dtype", "value"),
    [
        (lambda params: FusedAdamW(params, lr=1e-3), torch.float32, 3e38),
        (lambda params: FusedAdamW(params, lr=1e-3, optim_bits=8), torch.float32, 3e38),
        (lambda params: FusedAdamW(params, lr=1e-3, master_weights=True), torch.bfloat16, -3e38),
        (lambda params: torch.optim.AdamW(params, lr=1e-3), torch.float32, 1e25),
        (lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4), torch.float16, 3e4),
        (adamw_8bit, torch.float32, 3e38),
    ],
    ids=["ours", "ours in 8 bits", "masters of bf16", "torch", "pure fp16", "bitsandbytes"],
)
def test_finite_gradient_whose_square_is_not_stops_at_once(tmp_path, make, dtype, value):
    module = HugeValue(tiny_llama().to(dtype), make, value)
    with pytest.raises(NotTrainingError, match=r"not finite.* in optimizer step 2 .*1 of .*lm_head"):
        fit(tmp_path, module)


def test_finite_gradient_that_is_clipped_or_never_squared_raises_no_alarm(tmp_path):
    for make in (lambda params: torch.optim.SGD(params, lr=1e-30), lambda params: FusedAdamW(params, lr=1e-3)):

        class Clipped(HugeValue):
            def configure_gradient_clipping(self, optimizer, *args, **kwargs):
                if isinstance(optimizer, FusedAdamW):
                    optimizer.clip_next(1.0)

        model = tiny_llama()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # A rate too small to move fp32 weights is not what is judged here.
            health = GradientHealth(num_steps=4, allow_zero=["*"])
            fit(tmp_path, Clipped(model, make), health=health)
        assert health.status().state == "active"


def test_learning_rate_of_zero_for_ever_is_warned_about_and_fails_at_the_end(tmp_path):
    with (
        pytest.warns(UserWarning, match="learning rate was 0 in 4"),
        pytest.raises(NotTrainingError, match="learning rate was 0 in 6 of them"),
    ):
        fit(tmp_path, WithSchedule(tiny_llama(), [0.0]))


def test_run_without_a_single_label_fails_at_its_end(tmp_path):
    with (
        pytest.warns(UserWarning, match="4 had no labelled token"),
        pytest.raises(NotTrainingError, match="6 had no labelled token"),
    ):
        fit(tmp_path, PlainModule(tiny_llama()), loader=packed_loader(6, has_labels=False))


def test_run_that_ends_early_is_judged_on_what_there_was(tmp_path):
    with pytest.raises(NotTrainingError, match="did not train in 3 steps"):
        fit(tmp_path, UnusedExpert(tiny_llama()), health=GradientHealth(num_steps=20), num_batches=3)


def test_bf16_update_below_the_resolution_is_seen(tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.fill_(1.0)
    module = PlainModule(model, lr=1e-4)
    with pytest.raises(NotTrainingError, match=r"did not move .*norm\.weight"):
        fit(tmp_path, module)


# Housekeeping.


def test_hooks_are_gone_afterwards_and_later_steps_cost_nothing(tmp_path):
    class KeepsOptimizer(PlainModule):
        def configure_optimizers(self):
            self.optimizer = super().configure_optimizers()
            return self.optimizer

    module, health = KeepsOptimizer(tiny_llama()), GradientHealth(num_steps=3)
    fit(tmp_path, module, health=health)
    assert not module.optimizer._optimizer_step_post_hooks
    assert health._judges == []


def test_tiny_gradients_count_as_gradients(tmp_path):
    class Tiny(PlainModule):
        def on_after_backward(self):
            for parameter in self.parameters():
                parameter.grad.mul_(1e-30)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e28)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        health = fit(tmp_path, Tiny(tiny_llama()))
    assert "moved" in health.status().reason


def test_manual_optimization_with_two_optimizers(tmp_path):
    class Manual(PlainModule):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizers = self.optimizers()
            self.manual_backward(self.model(**batch).loss)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

        def configure_optimizers(self):
            head = [self.model.lm_head.weight]
            rest = [parameter for parameter in self.parameters() if parameter is not head[0]]
            return [torch.optim.SGD(head, lr=0.1), torch.optim.AdamW(rest, lr=1e-2)]

    health = GradientHealth(num_steps=3)
    fit(tmp_path, Manual(tiny_llama()), health=health, max_steps=12)
    assert "moved" in health.status().reason


def test_vectors_outside_an_optimizer_of_matrices_are_named_not_refused(tmp_path):
    class Matrices(PlainModule):
        def configure_optimizers(self):
            return torch.optim.Muon([parameter for parameter in self.parameters() if parameter.ndim == 2], lr=0.01)

    health = GradientHealth(num_steps=3)
    with pytest.warns(UserWarning, match="vectors"):
        quiet_trainer(tmp_path, strategy="fastft", callbacks=[health], max_steps=4).fit(
            Matrices(tiny_llama()), packed_loader(4)
        )
    assert health.status().state == "active"


@pytest.mark.slow(seconds=8)
def test_shards_are_judged_by_what_all_ranks_see(tmp_path):
    run_two_ranks("tests.callbacks.health_worker", tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for found in (first, second):
        failing = ("too small a rate", "a broken gradient on one rank")
        for case, reason in found.items():
            assert ("moved within 4 steps" in reason) is (case not in failing), case
        assert "did not move" in found["too small a rate"]
        assert "down_proj" in found["a broken gradient on one rank"]
