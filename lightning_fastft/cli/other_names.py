"""Names that other tools give to our options and commands, for the hints of an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning_fastft.cli.signatures import read_options
from lightning_fastft.cli.words import DEFAULT_CLASSES, TRAINER_CLASS

_LOSSES = "FineTuner has one loss; --model PreferenceTuner --model.loss sigmoid is DPO, --model PolicyTuner has GRPO."
_TRAINED = "Answers alone are trained; with data.loss_on all every token is."
# Variables of chat templates that other tools have as options.
_VARIABLES = {"enable_thinking": "false", "reasoning_effort": "high"}
# By the last part of an option: the option of ours with an example value where the name alone does not say it, or a
# sentence where there is none.
_OPTIONS: Mapping[str, str] = {
    # transformers and TRL
    "model_name_or_path": "model.model",
    "model_name": "model.model",
    "base_model": "model.model",
    "num_train_epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "epochs": "trainer.max_epochs",
    "steps": "trainer.max_steps",
    "num_steps": "trainer.max_steps",
    "gpus": "trainer.devices",
    "gradient_accumulation_steps": "trainer.accumulate_grad_batches",
    "max_grad_norm": "trainer.gradient_clip_val",
    "logging_steps": "trainer.log_every_n_steps",
    "eval_steps": "trainer.val_check_interval",
    "save_steps": "trainer.callbacks+=ModelCheckpoint --trainer.callbacks.every_n_train_steps N",
    "output_dir": "trainer.callbacks+=ModelCheckpoint --trainer.callbacks.dirpath FOLDER",
    "method": "model.lora.r 16 --model.quantization nf4",
    "dry_run": "fastft data, doctor and plan inspect a run without training it.",
    "report_to": "trainer.logger WandbLogger",
    "seed": "seed_everything",
    "resume_from_checkpoint": "ckpt_path",
    "resume": "ckpt_path",
    "checkpoint": "ckpt_path",
    "lr": "model.learning_rate",
    "learning_rate": "model.learning_rate",
    "weight_decay": "model.weight_decay",
    "lr_scheduler_type": "model.scheduler",
    "lr_scheduler": "model.scheduler",
    "warmup_ratio": "model.warmup_share",
    "epsilon": "model.clip_low",
    "epsilon_high": "model.clip_high",
    "delta": "model.dual_clip",
    "use_bias_correction_kl": "model.unbiased_kl",
    "mask_truncated_completions": "data.mask_truncated",
    "bf16": "model.dtype bfloat16",
    "fp16": "model.dtype float16 --trainer.precision 16-mixed",
    "torch_dtype": "model.dtype",
    "load_in_4bit": "model.quantization nf4",
    "load_in_8bit": "model.quantization nf4",
    "use_lora": "model.lora.r 16",
    "use_peft": "model.lora.r 16",
    "lora_r": "model.lora.r",
    "lora_rank": "model.lora.r",
    "rank": "model.lora.r",
    "lora_alpha": "model.lora.lora_alpha",
    "lora_dropout": "model.lora.lora_dropout",
    "target_modules": "model.lora.target_modules",
    "lora_target_modules": "model.lora.target_modules",
    "dataset": "data.paths",
    "datasets": "data.paths",
    "dataset_name": "data.paths",
    "train_file": "data.paths",
    "file": "data.paths",
    "files": "data.paths",
    "eval_dataset": "data.val_paths",
    "val_data": "data.val_paths",
    "val_file": "data.val_paths",
    "val_set_size": "data.val_share",
    "max_seq_length": "data.max_tokens",
    "max_seq_len": "data.max_tokens",
    "max_length": "data.max_tokens",
    "seq_len": "data.max_tokens",
    "cutoff_len": "data.max_tokens",
    "dataset_text_field": "data.columns.text body",
    **{name: f"data.chat_template_kwargs.{name} {value}" for name, value in _VARIABLES.items()},
    "reward_funcs": "data.rewards",
    "num_generations": "data.num_completions",
    "max_completion_length": "data.max_new_tokens",
    "max_tool_calling_iterations": "data.max_tool_turns",
    "lmbda": "data.sampled_share",
    **{name: f"data.sampling_options.{name}" for name in ("top_p", "top_k", "min_p", "repetition_penalty")},
    "dataset_num_proc": "data.num_proc",
    "dataloader_num_workers": "data.num_workers",
    "neftune_noise_alpha": "model.neftune_noise_alpha",
    "deepspeed": "trainer.strategy fastft_fsdp",
    "fsdp": "trainer.strategy fastft_fsdp",
    "wandb_project": "trainer.logger WandbLogger --trainer.logger.project NAME",
    "push_to_hub": "fastft push CHECKPOINT OWNER/NAME uploads a trained model.",
    "sequence_len": "data.max_tokens",
    "batch_size": "A pack is data.max_tokens long; a step has trainer.accumulate_grad_batches packs.",
    "mask_prompt": _TRAINED,
    "train_on_inputs": _TRAINED,
    "train_on_prompt": _TRAINED,
    "train_on_responses_only": _TRAINED,
    "completion_only_loss": _TRAINED,
    "assistant_only_loss": _TRAINED,
    "shuffle": "Packs are shuffled in each epoch, by data.seed and the number of the epoch.",
    "trust_remote_code": "Code of a model repository is never run; load such a model yourself and pass it in Python.",
    "loss": _LOSSES,
    "beta": _LOSSES,
    "packing": "Rows are always packed; data.max_tokens is the length of a pack.",
    "sample_packing": "Rows are always packed; data.max_tokens is the length of a pack.",
    "gradient_checkpointing": "Activations are planned from measured steps; docs/memory.md shows how to set them.",
    "flash_attention": "Attention is chosen by device and length; the table that fit prints names it.",
    "attn_implementation": "Attention is chosen by device and length; the table that fit prints names it.",
}
_SAME = {
    "num_gpus": "gpus",
    "out": "output_dir",
    "out_dir": "output_dir",
    "output": "output_dir",
    "loss_type": "loss",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "hub_model_id": "push_to_hub",
    "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size",
    "train_batch_size": "batch_size",
    "per_device_eval_batch_size": "batch_size",
}
_FUSED = "lightning_fastft.optim.FusedAdamW"
_EIGHT_BITS = f"{_FUSED} --model.optimizer.optim_bits 8"
_OFFLOAD = "--model.optimizer.offload 1.0"
_DEFAULT_ADAMW = "AdamW is the default, in a fused form; remove the option."
_NF4 = ("4bit", "4", "int4", "fp4", "bnb", "bnb_4bit", "bitsandbytes", "8bit", "int8")
# By the option's last part: what to write for a value in lower case.
_VALUES: Mapping[str, Mapping[str, str]] = {
    "loss": {
        "dpo": "sigmoid",
        "sft": "Supervised fine-tuning is --model FineTuner, without a loss.",
        **dict.fromkeys(("grpo", "dapo", "dr_grpo", "cispo", "sapo"), "This is a loss of --model PolicyTuner."),
        "gspo": "GSPO is --model PolicyTuner --model.ratio sequence.",
        "luspo": "LUSPO is --model PolicyTuner --model.ratio sequence with loss dr_grpo and max_completion_tokens 1.",
    },
    "optimizer": {
        **dict.fromkeys(("adam", "adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused"), _DEFAULT_ADAMW),
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw8bit"), _EIGHT_BITS),
        "paged_adamw_8bit": f"{_EIGHT_BITS} {_OFFLOAD}",
        **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), f"{_FUSED} {_OFFLOAD}"),
        "adafactor": "torch.optim.Adafactor",
        "muon": "lightning_fastft.optim.MuonAdamW",
        **dict.fromkeys(("lion", "lion_32bit"), "bitsandbytes.optim.Lion --allow-import bitsandbytes"),
        "lion_8bit": "bitsandbytes.optim.Lion8bit --allow-import bitsandbytes",
        "sgd": "torch.optim.SGD",
    },
    "dtype": {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"},
    "quantization": dict.fromkeys(_NF4, "nf4"),
    "for": {"ollama": "--ollama", "gguf": "--gguf q8_0"},
    "gguf": dict.fromkeys(
        ("q4_k_m", "q4_0", "q5_k_m", "q6_k", "int4", "4"),
        "Convert to f16, then run llama-quantize of llama.cpp on the file.",
    ),
    "method": {"peft": "lora", "sft": "full", "full_finetuning": "full", "4bit": "qlora"},
    "scheduler": {"constant_with_warmup": "constant --model.warmup_share 0.03", "cosine_with_min_lr": "cosine"},
}
# Options of the commands without a config: the one of ours if the command has it, else the next; or a sentence.
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("merge_and_unload", "save_method"), ("--merge",)),
    **dict.fromkeys(
        ("quantization", "quantization_method", "quantize", "quant", "format"), ("--gguf q8_0", "--method qlora")
    ),
    **dict.fromkeys(("load_in_4bit", "qlora"), ("--method qlora",)),
    **dict.fromkeys(("use_lora", "lora"), ("--method lora",)),
    "vllm": ("--for vllm",),
    "token": ("Log in first: hf auth login.",),
    "public": ("A new repository is public unless --private is given.",),
    **dict.fromkeys(("confirm", "upload"), ("--yes",)),
    **dict.fromkeys(("dataset", "datasets", "dataset_name", "data_path", "train_file", "train", "test"), ("--data",)),
    **dict.fromkeys(("model_name", "model_name_or_path", "base_model"), ("--model", "--base")),
    **dict.fromkeys(("output", "outfile", "output_file", "output_dir"), ("--out",)),
    "force": ("--overwrite",),
    "gpu": ("--device cuda",),
    **dict.fromkeys(("max_seq_length", "max_length"), ("--max-tokens", "--max-new-tokens")),
    **dict.fromkeys(("num_samples", "max_samples"), ("--limit",)),
    **dict.fromkeys(("raw", "no_chat_template"), ("--plain",)),
    "prompt": ("Write the text to its standard input.",),
}
# Names for the arguments of a command that have none.
_UNNAMED: Mapping[str, tuple[str, ...]] = {
    "source": ("source", "ckpt", "ckpt_path", "checkpoint", "model", "adapter", "folder", "path", "in", "input"),
    "out": ("out", "output", "output_dir", "out_dir"),
    "repository": ("repo", "repo_id", "repository", "name", "hub_model_id"),
}
COMMANDS: Mapping[str, str] = {
    "train": "fit",
    "finetune": "fit",
    "run": "fit",
    **dict.fromkeys(("sft", "dpo", "orpo", "kto", "grpo", "reward", "pretrain"), "fit"),
    "evaluate": "eval",
    "merge": "export",
    "save": "export",
    "upload": "push",
    "serve": "chat",
    "generate": "chat",
    "inference": "chat",
    "preprocess": "data",
    "compare": "report",
}


def hint_option(name: str, *, known: Collection[str] = ()) -> str:
    """Return a hint on an option that another tool has, as a line; "" for none.

    Args:
        name: The option, with or without the name of its group.
        known: The options that there are.

    Example:
        >>> print(hint_option("trainer.num_train_epochs"), end="")
        hint: did you mean trainer.max_epochs?
        >>> print(hint_option("fp16"), end="")
        hint: did you mean model.dtype float16 --trainer.precision 16-mixed?
    """
    last = name.rpartition(".")[2].replace("-", "_").lower()
    last = _SAME.get(last, last)
    return _render_hint(last if last in known else find_option(last))


def find_option(name: str) -> str:
    """Return the option of a config that an option of another tool means, or a sentence; "" for none.

    Example:
        >>> find_option("max-seq-length"), find_option("lora_rank"), find_option("val_paths")
        ('data.max_tokens', 'model.lora.r', 'data.val_paths')
    """
    head, _, rest = name.partition(".")
    owners = {**DEFAULT_CLASSES, "trainer": TRAINER_CLASS}
    if rest.partition(".")[0] in read_options(owners.get(head, TRAINER_CLASS)):
        return name
    last = name.rpartition(".")[2].replace("-", "_").lower()
    last = _SAME.get(last, last)
    having = (f"{head}.{last}" for head, owner in owners.items() if last in read_options(owner))
    return _OPTIONS.get(last) or next(having, "")


def hint_value(option: str, value: str) -> str:
    """Return a hint on a value that another tool has for an option, as a line; "" for none.

    Example:
        >>> print(hint_value("model.loss", "dpo"), end="")
        hint: did you mean sigmoid?
    """
    return _render_hint(_find_value(option, value))


def advise_value(option: str, value: str) -> str:
    """Return the same as a sentence with a space behind it.

    Example:
        >>> advise_value("dtype", "bf16")
        'Did you mean bfloat16? '
    """
    found = _find_value(option, value)
    return f"{found} ".lstrip() if not found or found.endswith(".") else f"Did you mean {found}? "


def hint_argument(name: str, *, known: Collection[str]) -> str:
    """Return a sentence on an option that another tool has for a command; "" if the command has no such option.

    Example:
        >>> hint_argument("merge_and_unload", known=["merge"])
        'Did you mean --merge?'
    """
    for found in _ARGUMENTS.get(name.replace("-", "_").lower(), ()):
        if found.endswith("."):
            return found
        if found.split()[0].lstrip("-") in known:
            return f"Did you mean {found}?"
    return ""


def is_unnamed(name: str, arguments: Collection[str]) -> bool:
    """Return whether an option names an argument that the command takes by position.

    Example:
        >>> is_unnamed("ckpt-path", ["source"]), is_unnamed("ckpt-path", ["runs"])
        (True, False)
    """
    return any(name.replace("-", "_").lower() in _UNNAMED.get(argument, ()) for argument in arguments)


def _find_value(option: str, value: str) -> str:
    return _VALUES.get(option.rpartition(".")[2], {}).get(value.lower(), "")


def _render_hint(found: str) -> str:
    if not found:
        return ""
    return f"hint: {found}\n" if found.endswith(".") else f"hint: did you mean {found}?\n"
