"""Write run reports of two ranks; run by torchrun, with the folder as its argument: a run that ends well, runs that
generate samples, and one whose rank 1 goes in the middle.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from lightning_fastft.hf.generation import generate_texts
from lightning_fastft.monitor.generate_samples import GenerateSamples
from lightning_fastft.monitor.run_report import RunReport
from lightning_fastft.packing.collate import collate
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.fine_tuners import CONFIG, word_tokenizer
from tests.support.rank_exit import leave
from tests.support.training_parts import PlainModule, packed_loader, quiet_trainer, random_documents, tiny_llama

NUM_STEPS, NUM_MICRO_BATCHES, NUM_RANKS = 6, 2, 2
GONE_AT = 3
PROMPTS = ["w3 w4 w5", "w6"]


def documents_of(step, part):
    """Parts of a step have very different numbers of labelled tokens."""
    return random_documents(1 + 4 * part, seed=10 * step + part)


def count_labelled(documents):
    return sum(len(document.labels) - 1 for document in documents)


def batches_of(rank):
    batches = []
    for step in range(NUM_STEPS):
        parts = [documents_of(step, part) for part in range(NUM_MICRO_BATCHES * NUM_RANKS)]
        num_items = sum(map(count_labelled, parts)) / len(parts)
        batches += [collate(parts[index], num_items=num_items) for index in range(rank, len(parts), NUM_RANKS)]
    return batches


class Still(PlainModule):
    """Its weights stay, so that the loss of every step is known; it may leave in the middle of a run."""

    def __init__(self, *, gone_at=None):
        torch.manual_seed(3)
        super().__init__(tiny_llama())
        self.gone_at = gone_at

    def training_step(self, batch, batch_idx):
        if self.gone_at is not None and self.trainer.global_step == self.gone_at:
            os._exit(0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(folder, module, rank):
    report = RunReport(folder / "run.html", profile_step=None)
    trainer = quiet_trainer(
        folder,
        devices=NUM_RANKS,
        strategy="fastft_ddp",
        max_steps=NUM_STEPS,
        accumulate_grad_batches=NUM_MICRO_BATCHES,
        callbacks=[report],
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches_of(rank), batch_size=None))


def fit_samples(folder, strategy):
    """Only rank 0 of DDP generates; the ranks of FSDP2 do it together. A validation follows each of two steps."""
    torch.manual_seed(3)
    module = FineTuner(CONFIG, init="random", dtype="float32", learning_rate=1e-12, tokenizer=None)
    samples = GenerateSamples(PROMPTS, max_new_tokens=6, tokenizer=word_tokenizer())
    trainer = quiet_trainer(
        folder,
        devices=NUM_RANKS,
        strategy=strategy,
        max_steps=2,
        val_check_interval=1,
        callbacks=[samples, RunReport(folder / "run.html", profile_step=None)],
        use_distributed_sampler=False,
    )
    trainer.fit(module, packed_loader(2), packed_loader(1, seed=9))
    if trainer.is_global_zero and strategy == "fastft_ddp":
        answers = generate_texts(
            module.model, tokenizer=word_tokenizer(), prompts=PROMPTS, max_new_tokens=6, do_sample=False
        )
        (folder / "answers.json").write_text(json.dumps(answers))


def main(folder):
    rank = int(os.environ["RANK"])
    fit(folder / "whole", Still(), rank)
    for strategy in ("fastft_ddp", "fastft_fsdp"):
        fit_samples(folder / strategy, strategy)
    # Rank 0 hears that its neighbour is gone.
    with contextlib.suppress(RuntimeError):
        fit(folder / "broken", Still(gone_at=GONE_AT if rank == 1 else None), rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
