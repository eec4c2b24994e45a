"""Train adapters of a base with added tokens on two ranks, save them, and compare with what stock PEFT reads: ``-m
tests.hf.added_tokens_worker <folder with a base>``.
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel

from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.hf.test_added_tokens import KINDS, NEW, logits, resized
from tests.support.datamodule_worker import make_data
from tests.support.rank_exit import leave
from tests.support.tiny_models import VOCABULARY
from tests.support.training_parts import quiet_trainer


def train(kind, strategy, folder):
    """Return the logits of the trained model and of its adapters on a base with other new rows."""
    lora = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False, **KINDS[kind]}
    module = FineTuner(resized(folder / "base", seed=1), lora=lora, learning_rate=1e-2)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_steps=2, use_distributed_sampler=False)
    rows = [{"input_ids": [3, *NEW, number % VOCABULARY, 5]} for number in range(24)]
    trainer.fit(module, make_data(rows=rows))
    trained, out = logits(module.model), folder / f"{kind}-{type(strategy).__name__}"
    # Data of a later stage are read with the vocabulary of the model.
    assert module.vocab_size > VOCABULARY
    module.save_pretrained(str(out))
    torch.distributed.barrier()
    return trained, logits(PeftModel.from_pretrained(resized(folder / "base", seed=2), str(out)))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = {
        (kind, strategy.__name__): train(kind, strategy(), folder)
        for kind in ("layers", "tokens")
        for strategy in (FastFTDDPStrategy, FastFTFSDPStrategy)
    }
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "found.pt")
    leave()
