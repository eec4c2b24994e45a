"""One rank of a peer in benchmarks/multi_gpu.py: transformers' Trainer with accelerate, and Unsloth with TRL's trainer.

A peer is SYSTEM-STRATEGY:MODE. It trains the packs, weights, adapters and learning rate of our runs, with fused AdamW
and clipping at the same norm. Rows of the trainers are the packs of a step in the order of the ranks, so that
accelerate gives each rank the pack that ours gives it. Logging and the filter of NaN losses, which would sync in each
step, are off.

- "transformers-fsdp": FSDP2 as TrainingArguments documents it, one unit for each layer. Modes: "recompute" (activation
  checkpointing of FSDP, which transformers recommends over its own: one all-gather less), "keep"; "+resident":
  ``reshard_after_forward`` is false; "+liger": Liger's norms, rotary, SwiGLU and cross-entropy. Liger's fused linear
  loss is off: it reads the weight of the head, which is a shard outside of the head's forward.
- "transformers-ddp": modes "recompute" (checkpointing of transformers, not reentrant), "keep", and "+liger" with the
fused
  linear loss.
- "unsloth-ddp": FastLanguageModel and the SFTTrainer it prepares, started by torchrun; modes as in
  benchmarks/ruler/arms/unsloth.py. "+alone": each process sees its own GPU only.
- "unsloth-fsdp": the same with the FSDP2 arguments of "transformers-fsdp". Unsloth's documentation says that FSDP of
  accelerate works, and gives no example.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# No heavy imports here: Unsloth must be imported before the libraries that it patches.
PEERS = {
    "transformers-fsdp": ("recompute", "keep"),
    "transformers-ddp": ("recompute", "keep"),
    "unsloth-ddp": ("unsloth", "off"),
    "unsloth-fsdp": ("unsloth", "off"),
}


# Parts that can be added to a mode.
MORE_WORDS = dict(zip(PEERS, ({"liger", "resident"}, {"liger"}, {"alone"}, {"alone"}), strict=True))


def parse_peer(text: str) -> tuple[str, str]:
    """Return strategy and mode of a peer; without a mode, the first of its modes.

    Raises:
        ValueError: There is no such peer or mode.

    Example:
        >>> parse_peer("transformers-fsdp:keep+liger"), parse_peer("unsloth-ddp")
        (('transformers-fsdp', 'keep+liger'), ('unsloth-ddp', 'unsloth'))
    """
    strategy, _, mode = text.partition(":")
    if strategy not in PEERS:
        raise ValueError(f"There is no run {text!r}; peers are {', '.join(PEERS)}.")
    first, *others = (mode or PEERS[strategy][0]).split("+")
    if first not in PEERS[strategy] or not set(others) <= MORE_WORDS[strategy]:
        raise ValueError(
            f"Modes of {strategy} are {' or '.join(PEERS[strategy])}, each with +{' or +'.join(sorted(MORE_WORDS[strategy]))}; "
            f"got {text!r}."
        )
    return strategy, "+".join([first, *others])


def run_rank(arguments: Sequence[str]) -> int:
    """Train as one rank; rank 0 writes the record."""
    options = argparse.Namespace(**json.loads(arguments[0]))
    options.out, options.root = Path(options.out), Path(options.root)
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    if "alone" in options.mode.split("+"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[_local_rank()] if visible else str(_local_rank())
        os.environ["LOCAL_RANK"] = "0"
    import torch

    if options.device == "cuda":
        torch.cuda.set_device(_local_rank())
    system = options.strategy.partition("-")[0]
    if system == "unsloth":
        import unsloth  # noqa: F401
    {"transformers": _run_transformers, "unsloth": _run_unsloth}[system](options)
    if options.device == "cpu":
        # As in benchmarks/multi_gpu.py: with a gloo group torch now and then aborts when the program ends.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _run_transformers(options: argparse.Namespace) -> None:
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    from benchmarks.ruler.workloads import lora_config

    is_cuda, files, share = options.device == "cuda", _files(options), _share(options)
    begin = time.monotonic()
    # Before the model: from here on accelerate's state has the device of this rank.
    arguments = TrainingArguments(**training_arguments(options), **_transformers_arguments(options))
    # Build document offsets once per batch, not in each layer from positions with a host sync.
    flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=is_cuda)

    def collate(packs: list[Any]) -> dict[str, Any]:
        (pack,) = packs
        return flatten([{"input_ids": ids, "labels": labels} for ids, labels in pack.documents(1.0)])

    trainer = Trainer(
        model=_load_peft(files, lora_config(files.workload), is_cuda=is_cuda),
        args=arguments,
        data_collator=collate,
        train_dataset=_rows(options, share),
    )
    _train(trainer, options, share, begin=begin, loss_of=trainer.model.get_base_model())


def _load_peft(files: Any, lora: Any, *, is_cuda: bool) -> Any:
    """Return the built model with the built adapters, on the device of this rank."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    from benchmarks.ruler.cases import base_dtype
    from benchmarks.ruler.judge import load_start

    model = AutoModelForCausalLM.from_pretrained(
        files.model,
        dtype=base_dtype(is_cuda=is_cuda),
        attn_implementation="flash_attention_2" if is_cuda else "sdpa",
        device_map={"": _local_rank() if is_cuda else "cpu"},
    )
    model.config.use_cache = False
    model = get_peft_model(model, lora)
    load_start(model, files.read_trained())
    return model


def _transformers_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of TrainingArguments for a mode."""
    words, is_sharded = options.mode.split("+"), options.strategy.endswith("fsdp")
    arguments: dict[str, Any] = {"remove_unused_columns": False}
    if "recompute" in words and not is_sharded:
        arguments |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if "liger" in words:
        arguments |= {
            "use_liger_kernel": True,
            "liger_kernel_config": {"fused_linear_cross_entropy": not is_sharded, "cross_entropy": is_sharded},
        }
    return arguments


def _run_unsloth(options: argparse.Namespace) -> None:
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    from benchmarks.ruler.arms import sft
    from benchmarks.ruler.arms.unsloth import MODES, add_adapters
    from benchmarks.ruler.cases import base_dtype
    from benchmarks.ruler.judge import load_start
    from benchmarks.ruler.workloads import TARGET_MODULES

    is_cuda, files, share = options.device == "cuda", _files(options), _share(options)
    begin = time.monotonic()
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(files.model),
        max_seq_length=options.tokens,
        load_in_4bit=False,
        dtype=base_dtype(is_cuda=is_cuda),
        device_map={"": _local_rank()},
        local_files_only=True,
    )
    mode = MODES[options.mode.partition("+")[0]]
    model = add_adapters(model, files.workload, target_modules=TARGET_MODULES, mode=mode)
    # TRL's own default would enable it again when training begins.
    checkpointing = {} if mode["use_gradient_checkpointing"] else {"gradient_checkpointing": False}
    trainer = SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=sft.seed_documents(),
        args=SFTConfig(
            **training_arguments(options),
            **checkpointing,
            max_length=options.tokens,
            packing=True,
            dataset_text_field="text",
            dataset_num_proc=1,
        ),
    )
    load_start(trainer.model, files.read_trained())
    trainer.train_dataset = sft.data_set(_rows(options, share), share=1.0)
    trainer._signature_columns = trainer.train_dataset.column_names
    _train(trainer, options, share, begin=begin)


def training_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that both trainers share."""
    from benchmarks.multi_gpu_steps import LORA_LEARNING_RATE
    from benchmarks.ruler.cases import MAX_GRADIENT_NORM

    is_cuda, words = options.device == "cuda", options.mode.split("+")
    sharding = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": "resident" not in words,
            "activation_checkpointing": "recompute" in words,
        },
    }
    return {
        "output_dir": str(options.out / "trainer_output"),
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": options.warmup + options.steps,
        "lr_scheduler_type": "constant",
        "learning_rate": LORA_LEARNING_RATE,
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRADIENT_NORM,
        "optim": "adamw_torch_fused" if is_cuda else "adamw_torch",
        "train_sampling_strategy": "sequential",
        "logging_steps": 100_000,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": is_cuda,
        # The loss is divided by the tokens of all ranks, as ours is.
        "average_tokens_across_devices": True,
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
        "accelerator_config": {"non_blocking": is_cuda},
        "seed": 3407,
        # Batches are collated before the step.
        **(
            {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 8}
            if is_cuda
            else {"use_cpu": True, "ddp_backend": "gloo"}
        ),
        **(sharding if options.strategy.endswith("fsdp") else {}),
    }


def _files(options: argparse.Namespace) -> Any:
    from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

    return WorkloadFiles(options.root, WORKLOADS[options.workload])


def _share(options: argparse.Namespace) -> Any:
    from benchmarks.multi_gpu_steps import find_rank, make_share, make_workload

    rank, num_ranks = find_rank()
    workload = make_workload(options, num_step_packs=num_ranks)
    return make_share(workload, options, num_step_packs=num_ranks, rank=rank, num_ranks=num_ranks)


def _rows(options: argparse.Namespace, share: Any) -> list[Any]:
    """Return the packs of all steps; accelerate gives row i to rank i modulo the number of ranks."""
    return [pack for step in range(options.warmup + options.steps) for pack in share.packs_of(step)]


def _train(trainer: Any, options: argparse.Namespace, share: Any, *, begin: float, loss_of: Any = None) -> None:
    """Train, and write the record on rank 0.

    Args:
        trainer: Ready to train.
        options: Options of the run.
        share: Packs of this rank.
        begin: Time at which the model began to load.
        loss_of: Model whose loss is recorded before FSDP2 rounds it to bf16, as it does with all outputs; None to
            record the result of ``training_step``.

    Raises:
        ValueError: A batch is not the pack of this rank, or a trained tensor had no gradient.
    """
    from importlib import metadata

    from benchmarks.multi_gpu_steps import StepLog, find_rank, new_record
    from benchmarks.ruler.arms import sft
    from benchmarks.ruler.attention import describe_attention
    from benchmarks.ruler.cases import CaseLog

    rank, num_ranks = find_rank()
    is_cuda = options.device == "cuda"
    record = new_record(options, num_ranks=num_ranks)
    record["versions"]["accelerate"] = metadata.version("accelerate")
    log = StepLog(record, is_cuda=is_cuda)
    follow = _make_callback(record, log, begin=begin, is_cuda=is_cuda)
    trainer.add_callback(follow)
    if options.strategy.endswith("fsdp") and not is_cuda:
        _shard_on_cpu(trainer)
    own_step, expected = trainer.training_step, sft.expected_batch(share.packs_of(0)[rank], share=1.0)

    def training_step(model: Any, inputs: dict[str, Any], *arguments: Any, **keywords: Any) -> Any:
        if not follow.num_done:
            record["batch"] = sft.check_batch(inputs, expected)
            units = check_units(model, is_sharded=options.strategy.endswith("fsdp"))
            record["attention"] = describe_attention(trainer.model)
            record["description"] = f"{sft.describe_model(model)}; {units}"
        loss = own_step(model, inputs, *arguments, **keywords)
        if loss_of is None:
            log.keep_loss(loss)
        return loss

    trainer.training_step = training_step
    if loss_of is not None:
        # A sum over the labelled tokens of all ranks: the trainer multiplies it by their number.
        loss_of.register_forward_hook(lambda module, given, output: log.keep_loss(output.loss * num_ranks))
    trainer.train()
    log.finish()
    follow.check_gradients()
    if rank == 0:
        CaseLog(options.out / "raw.jsonl").write(record)


def _shard_on_cpu(trainer: Any) -> None:
    """Make accelerate shard on CPUs, for tests: without a GPU it silently drops FSDP and wraps in DDP."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    AcceleratorState._shared_state.update(fsdp_plugin=plugin, distributed_type=DistributedType.FSDP)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


def check_units(model: Any, *, is_sharded: bool) -> str:
    """Return how a model is distributed, in one line.

    Raises:
        ValueError: FSDP2 is requested, but not every layer is one of its units, or weights are not sharded.
    """
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    num_units = sum(isinstance(module, FSDPModule) for module in model.modules())
    whole = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    text = f"{num_units} FSDP2 units, {len(whole)} whole tensors, {type(model).__name__}"
    if is_sharded and (num_units <= model.config.num_hidden_layers or whole):
        raise ValueError(f"FSDP2 was asked for, found {text}: {whole[:3]}.")
    return text


def _make_callback(record: dict[str, Any], log: Any, *, begin: float, is_cuda: bool) -> Any:
    import torch
    from transformers import TrainerCallback

    from benchmarks.ruler.measure import peak_memory_gib

    class Follow(TrainerCallback):
        """Report the steps to the log."""

        num_done = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if is_cuda:
                torch.cuda.synchronize()
                # Memory left from loading whole weights does not count.
                torch.cuda.empty_cache()
            record["build_s"] = time.monotonic() - begin
            record["peak_gib_build"] = log.gather(peak_memory_gib(is_cuda=is_cuda)["allocated"])

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if self.num_done == record["num_warmup"] - 1:
                self.squares = _gradient_squares(model)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.num_done += 1
            log.step_done()

        def check_gradients(self) -> None:
            """Refuse a run in which a trained tensor had no gradient, or one that is not finite, on all ranks."""
            torch.distributed.all_reduce(self.squares)
            record["num_trained_tensors"] = len(self.squares)
            record["gradient_norm"] = float(self.squares.sum().sqrt())
            num_bad = int((~self.squares.isfinite() | (self.squares == 0)).sum())
            if num_bad:
                raise ValueError(f"{num_bad} of {len(self.squares)} trained tensors have no gradient, or one of zeros.")

    return Follow()


def _gradient_squares(model: Any) -> Any:
    """Return the sum of squares of each trained tensor's gradient on this rank, 0 without a gradient."""
    import torch
    from torch.distributed.tensor import DTensor

    squares = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            gradient = parameter.grad
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            zero = torch.zeros((), device=parameter.device)
            squares.append(zero if gradient is None else gradient.detach().float().square().sum())
    return torch.stack(squares)


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
