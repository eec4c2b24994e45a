"""Resume two ranks with another optimizer or scheduler than the checkpoint has:
``-m tests.strategies.other_kinds_worker <folder>``.
"""

import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from lightning_fastft.core.errors import ResumeError
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from tests.support.fine_tuners import tuner
from tests.support.token_weighting_worker import micro_batches
from tests.support.training_parts import SaveAtStep, quiet_trainer


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def steps_down(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def annealed(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2)


# Options of the run that saves, of the one that resumes, and a word of the refusal.
CASES = {
    "scheduler": ({"scheduler": steps_down}, {"scheduler": annealed}, "scheduler"),
    "schedule": ({}, {"scheduler": steps_down}, "scheduler"),
    "moments": ({}, {"optimizer": momentum}, "betas"),
    "no moments": ({}, {"optimizer": plain}, "betas"),
    "momentum": ({"optimizer": momentum}, {}, "momentum"),
    "groups": ({}, {"optimizer": torch.optim.AdamW, "weight_decay": None}, "parameter groups"),
    "same without moments": ({"optimizer": plain}, {"optimizer": plain}, ""),
    "same": ({"scheduler": steps_down}, {"scheduler": steps_down}, ""),
}
# As a folder or one file.
FORMS = {"folder": True, "file": False}


def fit(options, *, folder, is_folder, callbacks=(), ckpt_path=None):
    torch.manual_seed(5)
    trainer = quiet_trainer(
        folder,
        devices=2,
        strategy=FastFTFSDPStrategy(save_distributed_checkpoint=is_folder),
        max_steps=2,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )
    batches = micro_batches(accumulate=1, world_size=2, rank=int(os.environ["RANK"])) * 2
    trainer.fit(tuner("full", **options), DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def resume(before, now, *, folder, is_folder):
    """What a resumed run says, or the step at which it ends."""
    path = folder / "a.ckpt"
    fit(before, folder=folder, is_folder=is_folder, callbacks=[SaveAtStep(1, path)])
    try:
        return str(fit(now, folder=folder, is_folder=is_folder, ckpt_path=path).global_step)
    except ResumeError as error:
        return str(error)


def main(folder):
    folder = Path(folder)
    found = {
        (case, form): resume(before, now, folder=folder / case / form, is_folder=is_folder)
        for case, (before, now, _) in CASES.items()
        for form, is_folder in FORMS.items()
    }
    torch.save(found, folder / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
