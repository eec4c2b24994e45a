"""Train a tiny model once with a save at every optimizer step, resume from some of them, and compare with how the first
run went on.

In this process, or on two ranks: ``torchrun --nproc_per_node 2 -m tests.parity.resume_worker <ddp|fsdp> <kind>
<folder>``.
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.datamodule_worker import VOCABULARY, make_rows
from tests.support.rank_exit import leave
from tests.support.token_weighting_worker import CONFIG
from tests.support.training_parts import quiet_data, quiet_trainer

NUM_STEPS, ACCUMULATE = 21, 2
LORA = {"r": 4, "lora_alpha": 4, "lora_dropout": 0.1}
KINDS = {"lora": {"lora": LORA}, "full": {}, "qlora": {"lora": LORA, "quantization": "nf4"}}
STRATEGIES = {"one": FastFTStrategy, "ddp": FastFTDDPStrategy, "fsdp": FastFTFSDPStrategy}


class Draws(Callback):
    """Dropout on the embedding, and a number per micro-batch from each of the other generators; keeps them and
    the losses.
    """

    def __init__(self):
        self.losses, self.drawn, self.batches = [], [], []

    def setup(self, trainer, pl_module, stage):
        pl_module.register_transform("dropout", self._add_dropout)

    def _add_dropout(self, model):
        embedding = model.get_input_embeddings()
        embedding.register_forward_hook(
            lambda module, inputs, output: torch.nn.functional.dropout(output, 0.1, module.training)
        )

    def on_train_start(self, trainer, pl_module):
        # Ranks draw differently, and a resumed run that restored nothing would draw what no run drew.
        self._seed(100 * (1 + trainer.global_step) + trainer.global_rank)

    def _seed(self, seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.drawn.append([random.random(), float(np.random.rand())])
        self.batches.append(int(batch.index))


class Look(Callback):
    """The state of the last optimizer step, weights and moments of this rank, and what would be drawn next."""

    def __init__(self):
        self.state = {}

    def on_train_end(self, trainer, pl_module):
        local = lambda tensor: getattr(tensor, "to_local", lambda: tensor)().detach().clone()  # noqa: E731
        trained = [(name, parameter) for name, parameter in pl_module.named_parameters() if parameter.requires_grad]
        self.state = {name: local(parameter) for name, parameter in trained}
        for name, parameter in trained:
            for key, value in trainer.optimizers[0].state[parameter].items():
                self.state[f"{name}.{key}"] = local(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
        self.state["next draw"] = torch.rand(3)
        self.state["learning rate"] = torch.tensor([group["lr"] for group in trainer.optimizers[0].param_groups])


def train(kind, strategy, folder, *, ckpt_path=None, keep=False, save_last=None, callbacks=(), seed=3, **options):
    """One run, as a user writes it; validation in the middle of its epochs."""
    seed_everything(seed, verbose=False)
    module = FineTuner(
        {**CONFIG, "vocab_size": VOCABULARY},
        init="random",
        dtype="float32",
        learning_rate=1e-2,
        warmup_steps=2,
        **KINDS[kind],
    )
    rows = make_rows(90)
    data = quiet_data(rows, val_paths=rows[:8], max_tokens=64, seed=5)
    draws, look = Draws(), Look()
    saved = (
        [ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_last=save_last)]
        if keep
        else []
    )
    world_size = 1 if strategy == "one" else 2
    options = {"max_steps": NUM_STEPS, "val_check_interval": 6, **options}
    trainer = quiet_trainer(
        folder,
        devices=world_size,
        strategy=STRATEGIES[strategy](),
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        enable_checkpointing=keep,
        callbacks=[draws, look, *callbacks, *saved],
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
        **options,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return {
        "losses": draws.losses,
        "drawn": draws.drawn,
        "batches": draws.batches,
        "state": look.state,
        "step": trainer.global_step,
    }


def differences(whole, resumed, *, after):
    """What is not equal to the bit between a run and its continuation from a step; empty where all is."""
    begin = after * ACCUMULATE
    found = [name for name in ("losses", "drawn", "batches") if whole[name][begin:] != resumed[name]]
    found += [name for name, value in whole["state"].items() if not torch.equal(value, resumed["state"][name])]
    return found + ([] if whole["step"] == resumed["step"] else ["step"])


def resume_from(stops, kind, strategy, folder):
    """The differences of each resumed run, by step."""
    whole = train(kind, strategy, folder, keep=True)
    assert whole["step"] == NUM_STEPS
    assert len(set(whole["losses"])) > NUM_STEPS
    return {
        stop: differences(
            whole, train(kind, strategy, folder, ckpt_path=Path(folder) / f"step={stop}.ckpt"), after=stop
        )
        for stop in stops
    }


if __name__ == "__main__":
    name, kind, folder, *stops = sys.argv[1:]
    found = resume_from([int(stop) for stop in stops], kind, name, Path(folder))
    gathered = [None, None]
    torch.distributed.all_gather_object(gathered, found)
    if torch.distributed.get_rank() == 0:
        torch.save(gathered, Path(folder) / "found.pt")
    leave()
