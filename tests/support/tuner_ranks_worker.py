"""Gradients of one optimizer step of each tuner over the same examples, however they are packed, accumulated, spread over
ranks and computed.

Imported by test_tuner_ranks.py, and run on two ranks: ``-m tests.support.tuner_ranks_worker <file> <folder of a model>``.
"""

import copy
import os
import sys

import numpy as np
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.preference import PreferenceTuner
from lightning_fastft.training.reward import RewardTuner
from lightning_fastft.training.rollouts import RolloutDataModule
from lightning_fastft.training.samplers import FunctionSampler
from tests.support.packs import make_documents, make_groups
from tests.support.rank_exit import leave
from tests.support.training_parts import SaveAtStep, quiet_data, quiet_trainer
from tests.support.tuners import CONFIG, LORA
from tests.training.test_rollouts import character_tokenizer

NUM_EXAMPLES = 16
STRATEGIES = {"ddp": FastFTDDPStrategy, "fsdp": FastFTFSDPStrategy}
# Larger than transformers' own weights, so that attention is far from uniform.
DENSE = {**CONFIG, "initializer_range": 0.15}
MIXTURE = {
    **DENSE, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
KINDS = {
    "dpo": (PreferenceTuner, {"lora": LORA, "reference": "adapters_off"}),
    "orpo": (PreferenceTuner, {"loss": "orpo"}),
    "reward": (RewardTuner, {"lora": LORA}),
    "grpo": (PolicyTuner, {"lora": LORA, "kl_weight": 0.1, "reference": "adapters_off"}),
    "dapo": (PolicyTuner, {"loss": "dapo", "advantage": "centred"}),
    "distillation": (DistillationTuner, {"lora": LORA}),
}
# Its loss reads an estimate over the packs of a micro-batch, so other packs are another loss.
KTO = "kto"
KINDS_WITH_KTO = {**KINDS, KTO: (PreferenceTuner, {**KINDS["dpo"][1], "loss": "kto", "beta": 0.5})}
ACCUMULATIONS = (1, 4)


def make_tuner(kind, *, config=DENSE, **more):
    """A tuner on random weights of a configuration, or on those of a folder."""
    tuner_class, options = KINDS_WITH_KTO[kind]
    if tuner_class is DistillationTuner:
        options = {**options, "teacher": make_teacher(config)}
    values = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0), **options, **more}
    init = "pretrained" if isinstance(config, str) else "random"
    return tuner_class(
        copy.deepcopy(config), init=init, dtype="float32", scheduler="constant", warmup_steps=0, **values
    )


def make_teacher(config):
    from transformers import AutoConfig, AutoModelForCausalLM

    # The seed of the process stays that of the student, which DDP sets again.
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))


def examples(kind):
    """Examples from short to long: windows and ranks get very different shares of tokens."""
    draws = np.random.default_rng(0)
    lengths = sorted(tuple(draws.integers(1, 14, size=3).tolist()) for _ in range(NUM_EXAMPLES))
    if kind == "distillation":
        return make_documents([max(2, sum(each)) for each in lengths])
    documents = make_groups(lengths)
    if kind == KTO:
        return [each._replace(scores=(float(number % 2), 0.0)) for number, each in enumerate(documents)]
    # A sampler that was about as sure as the model is.
    return [document._replace(log_probs=document.log_probs * 3 - 3) for document in documents]


def count(kind, document):
    """What an example counts in the mean of a loss."""
    unit = KINDS_WITH_KTO[kind][0](DENSE, init="random", **_options(kind)).data_needs.loss_unit
    if unit == "token":
        return int((document.labels[1:] != -100).sum())
    return 1 if unit == "example" else len(document.scores)


def _options(kind):
    tuner_class, options = KINDS_WITH_KTO[kind]
    return {**options, "teacher": "none"} if tuner_class is DistillationTuner else options


def micro_batches(kind, *, accumulate, world_size=1, rank=0, **options):
    """The share of one rank."""
    documents = examples(kind)
    total = sum(count(kind, document) for document in documents)
    parts = np.array_split(np.arange(NUM_EXAMPLES), accumulate * world_size)[rank::world_size]
    divisor = total / (accumulate * world_size)
    return [collate([documents[index] for index in part], num_items=divisor, **options) for part in parts]


class KeepGradient(Callback):
    """Holds the gradients that the optimizer is about to see, whole."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradient = {
            name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad.clone()
            for name, parameter in pl_module.named_parameters()
            if parameter.requires_grad and parameter.grad is not None
        }


def gradient(kind, batches, *, strategy=None, num_ranks=1, config=DENSE, callbacks=()):
    """Gradients by name of one optimizer step of ``Trainer.fit`` over the batches of this rank."""
    seed_everything(3, verbose=False)
    keep = KeepGradient()
    trainer = make_trainer(
        strategy or FastFTStrategy(), num_ranks=num_ranks, max_steps=1, accumulate_grad_batches=len(batches),
        callbacks=[*callbacks, keep],
    )  # fmt: skip
    trainer.fit(make_tuner(kind, config=config), DataLoader(batches, batch_size=None))
    return keep.gradient


def make_trainer(strategy, *, num_ranks, **options):
    return quiet_trainer(devices=num_ranks, strategy=strategy, use_distributed_sampler=False, **options)


def stored_losses(strategy, *, config=DENSE, callbacks=(), **validation):
    """Losses of an epoch that trains nothing, whose reference was stored by the ranks together."""
    seed_everything(3, verbose=False)
    tuner = make_tuner("dpo", config=config, reference="stored", tokenizer=character_tokenizer(), lora={**LORA, "r": 2})
    rows = [{"prompt": f"{number}+", "chosen": f"{number % 7}1", "rejected": "23"} for number in range(41)]
    data = quiet_data(rows, max_tokens=48, **validation)
    trainer = make_trainer(
        strategy, num_ranks=2, max_epochs=1, max_steps=-1, limit_val_batches=1.0, callbacks=list(callbacks)
    )
    trainer.fit(tuner, data)
    return {name: float(value) for name, value in trainer.callback_metrics.items() if name.endswith("_loss")}


def weights_after_rounds(strategy, *, kind="grpo", config=DENSE, callbacks=(), ckpt_path=None, **options):
    """Adapters after rounds of two steps, for which each rank sampled its own rollouts; a student samples half of
    them.
    """
    seed_everything(3, verbose=False)
    tuner = make_tuner(
        kind, config=config, tokenizer=character_tokenizer(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )  # fmt: skip
    prompts = [{"prompt": f"{number}+", "completion": "1=2=3=4=5"} for number in range(8)]
    judges = {"rewards": first_tokens} if kind == "grpo" else {"sampled_share": 0.5}
    data = RolloutDataModule(
        prompts, num_completions=3, prompts_per_round=4, max_new_tokens=3, max_tokens=16, **judges, **options
    )
    trainer = make_trainer(strategy, num_ranks=2, max_steps=5, callbacks=list(callbacks))
    trainer.fit(tuner, data, ckpt_path=ckpt_path)
    return trained_weights(tuner)


def weights_after_stored_teacher(strategy, store, *, accumulate=2):
    """Adapters after two steps towards a teacher whose hidden states are stored, or that is live where store is None."""
    seed_everything(3, verbose=False)
    tuner = make_tuner(
        "distillation", tokenizer=character_tokenizer(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        store=store, top_k=None,
    )  # fmt: skip
    rows = [{"text": f"{number}+{number % 3}=" + "1" * (number % 5)} for number in range(40)]
    data = quiet_data(rows, max_tokens=16)
    make_trainer(strategy, num_ranks=2, max_steps=2, accumulate_grad_batches=accumulate).fit(tuner, data)
    return trained_weights(tuner)


def trained_weights(tuner):
    return {
        name: (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()
        for name, parameter in tuner.named_parameters()
        if parameter.requires_grad
    }


def count_up(prompts):
    """Completions of one to three tokens."""
    return [[4 + (sum(ids) + place) % 8] * (1 + sum(ids) * (place + 1) % 3) for place, ids in enumerate(prompts)]


def first_tokens(*, prompts, completions, **columns):
    return [float(ord(completion[0]) % 5) if completion else 0.0 for completion in completions]


def refusal(run):
    """The message of the OptionError that a run ends with."""
    try:
        run()
    except OptionError as error:
        return str(error)
    return ""


def cases():
    """Kind, strategy and accumulation of each case on two ranks."""
    found = [(kind, "ddp", accumulate) for kind in KINDS for accumulate in ACCUMULATIONS]
    return [
        *found,
        ("dpo", "fsdp", 1),
        ("dpo", "fsdp", 4),
        ("grpo", "fsdp", 4),
        ("reward", "fsdp", 1),
        ("orpo", "fsdp", 4),
        (KTO, "ddp", 1),
        (KTO, "fsdp", 1),
    ]


def main():
    """Write the gradients of this rank, by kind, strategy and accumulation, and what the data modules did."""
    rank, (path, folder) = int(os.environ["RANK"]), sys.argv[1:]
    found = {
        "stored, ddp": stored_losses(FastFTDDPStrategy(), val_share=0.3),
        "stored, fsdp": stored_losses(FastFTFSDPStrategy(), val_share=0.3),
        # The ranks exchange tokens in each layer, and their packs have other lengths.
        "stored, owned experts": stored_losses(
            FastFTFSDPStrategy(expert_parallel=2), config=MIXTURE, callbacks=[BincountRouter()], val_share=0.3
        ),
        # The second rank has none to validate.
        "stored, one example": stored_losses(
            FastFTDDPStrategy(), val_paths=[{"prompt": "7+", "chosen": "1", "rejected": "23"}]
        ),
        "rollouts": weights_after_rounds(FastFTDDPStrategy(), callbacks=[SaveAtStep(3, f"{path}.ckpt")]),
        "rollouts, resumed": weights_after_rounds(FastFTDDPStrategy(), ckpt_path=f"{path}.ckpt"),
        **{
            f"rollouts, {experts} experts": weights_after_rounds(
                FastFTFSDPStrategy(expert_parallel=size), config=MIXTURE, callbacks=[BincountRouter()],
                sampler=FunctionSampler(count_up),
            )
            for experts, size in {"gathered": 1, "owned": 2}.items()
        },
        "on policy": weights_after_rounds(
            FastFTDDPStrategy(), kind="distillation", callbacks=[SaveAtStep(3, f"{path}-on-policy.ckpt")]
        ),
        "on policy, resumed": weights_after_rounds(
            FastFTDDPStrategy(), kind="distillation", ckpt_path=f"{path}-on-policy.ckpt"
        ),
        "live teacher": weights_after_stored_teacher(FastFTDDPStrategy(), None),
        "refused, fsdp": refusal(lambda: weights_after_stored_teacher(FastFTFSDPStrategy(), f"{path}-teacher")),
        "stored teacher, ddp": weights_after_stored_teacher(FastFTDDPStrategy(), f"{path}-teacher"),
        "stored teacher, fsdp": weights_after_stored_teacher(FastFTFSDPStrategy(), f"{path}-teacher"),
        "files": gradient(
            "reward", micro_batches("reward", accumulate=1, world_size=2, rank=rank), strategy=FastFTFSDPStrategy(),
            num_ranks=2, config=folder,
        ),
    }  # fmt: skip
    for kind, name, accumulate in cases():
        batches = micro_batches(kind, accumulate=accumulate, world_size=2, rank=rank)
        found[kind, name, accumulate] = gradient(kind, batches, strategy=STRATEGIES[name](), num_ranks=2)
    torch.save(found, f"{path}.{rank}")


if __name__ == "__main__":
    main()
    leave()
