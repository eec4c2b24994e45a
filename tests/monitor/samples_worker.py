"""Samples of a mixture of experts whose experts are owned by two ranks: ``-m tests.monitor.samples_worker <file>``.

Each rank writes its own answers; imported by test_generate_samples.py for those of one process.
"""

import os
import sys

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback

from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.monitor.generate_samples import GenerateSamples
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.fine_tuners import word_tokenizer
from tests.support.rank_exit import leave
from tests.support.sizes import tiny_qwen3
from tests.support.training_parts import VOCAB_SIZE, quiet_data, quiet_trainer

MIXTURE = {
    **tiny_qwen3(vocab=VOCAB_SIZE, initializer_range=0.3), "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
NUM_NEW = 4
# More tokens than the packs of a validation, and fewer.
PROMPTS = (" ".join(f"w{3 + number % 50}" for number in range(40)), "w7 w8")


class Write(Callback):
    """Calls ``generate`` of the tuner after a validation."""

    def on_validation_epoch_end(self, trainer, pl_module):
        self.texts = pl_module.generate(PROMPTS, max_new_tokens=NUM_NEW, do_sample=False)


def find_answers(*, num_ranks):
    """Answers of GenerateSamples, and of the tuner itself, during a fit that trains nothing."""
    seed_everything(5, verbose=False)
    tuner = FineTuner(
        MIXTURE, init="random", dtype="float32", tokenizer=word_tokenizer(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )  # fmt: skip
    samples, write = GenerateSamples(PROMPTS, max_new_tokens=NUM_NEW), Write()
    strategy = FastFTStrategy() if num_ranks == 1 else FastFTFSDPStrategy(expert_parallel=num_ranks)
    trainer = quiet_trainer(
        devices=num_ranks, strategy=strategy, max_steps=1, num_sanity_val_steps=0, val_check_interval=1,
        callbacks=[BincountRouter(), samples, write],
    )  # fmt: skip
    rows = [{"input_ids": list(range(3, 3 + length))} for length in (9, 5, 12, 7)]
    trainer.fit(tuner, quiet_data(rows, val_paths=rows, max_tokens=14))
    return {"samples": [found.answers for found in samples.samples], "generate": write.texts}


if __name__ == "__main__":
    torch.save(find_answers(num_ranks=2), f"{sys.argv[1]}.{os.environ['RANK']}")
    leave()
