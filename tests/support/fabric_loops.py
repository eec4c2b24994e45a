"""The same tiny run by a Trainer with FineTuner and by a loop under FastFTFabric."""

import torch
from lightning.pytorch import Callback
from peft import LoraConfig, get_peft_model

from lightning_fastft import BincountRouter, FineTuner, FusedKernels, OffloadCheckpointing, PackedDataModule
from lightning_fastft.fabric import FastFTFabric
from lightning_fastft.optim import FusedAdamW
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.training_parts import quiet_trainer

NUM_STEPS, ACCUMULATE, CLIP = 3, 2, 0.5


def make_data(**options):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 14, (40,), generator=generator).tolist()
    rows = [{"input_ids": torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()} for length in lengths]
    fixed = {"num_workers": 0, "cache_dir": None, "num_proc": 1, "show_progress": False}
    return PackedDataModule(rows, max_tokens=24, **fixed | options)


def make_model(name="qwen3_moe", *, has_adapters=True):
    model = build_tiny(name, attention="sdpa")
    if has_adapters:
        torch.manual_seed(1)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
        model = get_peft_model(model, lora)
    return model.train()


def make_optimizer(model):
    return FusedAdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)


def make_callbacks():
    return [FusedKernels(), BincountRouter()]


def trained(model):
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


class Losses(Callback):
    """Collect the loss of every backward, and the gradients before the last step."""

    def __init__(self):
        self.losses, self.gradients = [], {}

    def on_before_backward(self, trainer, pl_module, loss):
        self.losses.append(loss.item())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients = gradients_of(pl_module.model)


def gradients_of(model):
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def run_trainer(policy, **options):
    model, seen = make_model(), Losses()
    tuner = FineTuner(model, optimizer=lambda params: FusedAdamW(params, lr=1e-2), scheduler="constant", warmup_share=0)
    from lightning_fastft import FastFTStrategy

    options.setdefault("strategy", FastFTStrategy(activations=OffloadCheckpointing(policy)))
    trainer = quiet_trainer(
        max_steps=NUM_STEPS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        callbacks=[*make_callbacks(), seen],
        **options,
    )
    trainer.fit(tuner, make_data())
    return seen.losses, seen.gradients, trained(model)


def run_fabric(policy, **options):
    model = make_model()
    fabric = FastFTFabric(
        accelerator="cpu",
        activations=OffloadCheckpointing(policy),
        callbacks=make_callbacks(),
        **{"devices": 1} | options,
    )
    fabric.launch()
    loader = fabric.setup_datamodule(make_data(), accumulate=ACCUMULATE)
    losses, gradients = [], {}
    with fabric:
        wrapped, optimizer = fabric.setup(model, make_optimizer(model))
        assert {status.name for status in fabric.statuses() if status.state == "active"} >= {
            "packed attention",
            "fused layers",
            "expert router",
        }
        for number, batch in enumerate(loader):
            is_accumulating = (number + 1) % ACCUMULATE != 0
            with fabric.no_backward_sync(wrapped, enabled=is_accumulating):
                loss = wrapped(**batch).loss / ACCUMULATE
                losses.append(loss.item())
                fabric.backward(loss)
            if not is_accumulating:
                gradients = gradients_of(model)
                fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
            if number + 1 == NUM_STEPS * ACCUMULATE:
                break
    return losses, gradients, trained(model)
