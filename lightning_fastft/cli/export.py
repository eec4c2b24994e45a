"""``fastft export``: write trained adapters or merged weights as a plain Hugging Face folder."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_fastft.cli.words import take_option
from lightning_fastft.core.checks import check_choice, local_path
from lightning_fastft.core.errors import OptionError

if TYPE_CHECKING:
    import torch

    from lightning_fastft.training.fine_tuner import FineTuner

HOW = (
    "fastft export CHECKPOINT_OR_FOLDER OUT [--merge] [--base NAME] [--dtype NAME] [--device NAME] "
    "[--accept-other-base] [--for vllm]"
)
_MIB = 2**20


class _Question(NamedTuple):
    """The options of ``fastft export``."""

    source: Path
    out: Path
    is_merged: bool
    base: str
    dtype: str
    device: torch.device
    accepts_other_base: bool
    server: str = ""


def run_export(words: Sequence[str]) -> int:
    """Write the adapters or merged weights of a checkpoint or PEFT folder to a new folder and verify them; return 0.

    Args:
        words: A checkpoint file of a FineTuner or another tuner (not of a RewardTuner) or a folder of PEFT adapters,
            then the folder to write. ``--merge`` merges the adapters into the weights of the whole model. ``--base
            NAME`` is the base model, if it has moved since training. ``--dtype`` is the dtype of merged weights; by
            default that of the run, or if that is "auto", bfloat16 on an NF4 base and else the dtype of the base's
            files. ``--device`` is the device to build the model on (cpu). ``--accept-other-base`` accepts a base with
            other weights than those of the run. ``--for vllm`` refuses adapters of which vLLM would not read a part.

    Raises:
        OptionError: The target exists, the source does not exist or is of another kind, or its base is not known.
        DamagedCheckpointError: The checkpoint does not match its digest.
        ResumeError: The checkpoint does not fit the model that it names, or the base has other weights.
        UnsupportedModelError: vLLM would not read all of the adapters.
        CheckpointNotSavedError: The folder cannot be written or reads back differently; it is removed.

    Cost:
        The base on the device once; for a merge, once more on the host while it is verified.
    """
    question = _read_question(words)
    from lightning_fastft.hf.export import check_free, export_adapters, export_merged

    check_free(question.out)
    module, notes = _open(question)
    if not question.is_merged:
        if module.hparams.get("frozen_adapters"):
            raise OptionError(
                f"The adapters in {question.source} were trained beside frozen ones and fit only a base with those. "
                "Add --merge to write the base with all adapters."
            )
        module.to_plain_lora()
    if question.server and module.has_adapters and not question.is_merged:
        from lightning_fastft.hf.read_back import check_for_vllm

        rank = check_for_vllm(module.model)
        notes.append(
            f"for vLLM: vllm serve BASE --enable-lora --max-lora-rank {rank} --lora-modules NAME={question.out}"
        )
    module.model.eval()
    # Avoid memory for a backward.
    module.model.requires_grad_(requires_grad=False)
    if question.is_merged or not module.has_adapters:
        exported = export_merged(module.model, question.out, tokenizer=module.tokenizer)
    else:
        exported = export_adapters(module.model, question.out, tokenizer=module.tokenizer)
    notes.append(
        "without a tokenizer, because none is known" if module.tokenizer is None else "the tokenizer is included"
    )
    kind = "merged weights" if question.is_merged else "adapters" if module.has_adapters else "all weights"
    lines = [f"Wrote {kind} to {question.out}: {exported.num_tensors} tensors, {exported.num_bytes / _MIB:,.1f} MiB."]
    lines += [f"  {note}" for note in notes]
    lines.append(
        "  read back by stock libraries: keys, dtypes and values equal, largest difference of a logit "
        f"{exported.reload_difference:.1e}"
    )
    if question.is_merged:
        lines.append(
            f"  relative logit difference between the merged model and adapters: {exported.merge_difference:.1e}"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _read_question(words: Sequence[str]) -> _Question:
    """Parse and validate the command line."""
    flags = ("--merge", "--accept-other-base")
    is_merged, accepts_other_base = (flag in words for flag in flags)
    rest = [word for word in words if word not in flags]
    base, rest = take_option(rest, "--base", default="")
    dtype, rest = take_option(rest, "--dtype", default="auto")
    server, rest = take_option(rest, "--for", default="")
    device, rest = take_option(rest, "--device", default="cpu")
    if len(rest) != 2 or any(word.startswith("-") for word in rest):
        raise OptionError(f"fastft export takes a source and a target, got {' '.join(rest) or 'nothing'}: {HOW}")
    check_choice("--for", server, ("", "vllm"))
    check_choice("--dtype", dtype, ("auto", "bfloat16", "float16", "float32"))
    if dtype != "auto" and not is_merged:
        raise OptionError(
            "--dtype applies only to merged weights; adapters and trained weights keep their dtype. Add --merge, or "
            "remove --dtype."
        )
    source = local_path(rest[0], use="exported from")
    if not source.exists():
        raise OptionError(
            f"There is nothing at {source} (searched from {Path.cwd()}). Give a checkpoint or a folder of adapters."
        )
    # Imported last: other mistakes are answered without torch.
    import torch

    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"--device must be a device of torch, got {device!r}: {error}") from error
    return _Question(source, Path(rest[1]), is_merged, base, dtype, place, accepts_other_base, server)


def _open(question: _Question) -> tuple[FineTuner, list[str]]:
    """Return a module with its built model and adapters, and notes for the user."""
    source = question.source
    if source.is_file():
        return _open_checkpoint(question)
    if (source / "adapter_config.json").is_file():
        return _open_folder(question)
    if (source / "meta.pt").is_file():
        raise OptionError(
            f"{source} is a folder with the pieces of several ranks: resume it with strategy='fastft_fsdp' and call "
            "save_pretrained on the module."
        )
    if (source / "config.json").is_file():
        raise OptionError(f"{source} is a whole model already, so there is nothing to export.")
    raise OptionError(f"{source} is neither a checkpoint file of a FineTuner nor a folder with an adapter_config.json.")


def _open_checkpoint(question: _Question) -> tuple[FineTuner, list[str]]:
    """Build the model of a checkpoint and load its trained weights."""
    import torch

    from lightning_fastft.training.fine_tuner import FineTuner
    from lightning_fastft.training.tuner import Tuner

    content = _read_checkpoint(question.source)
    trained = content["fastft_base"]
    # Options of the loss belong to the run, not to the model.
    known = inspect.signature(Tuner.__init__).parameters
    options = {name: value for name, value in content["hyper_parameters"].items() if name in known}
    has_adapters = options.get("lora") is not None
    if question.is_merged and not has_adapters:
        raise OptionError(
            f"{question.source} has all weights and no adapters, so there is nothing to merge. Remove --merge."
        )
    if question.base:
        options.update(model=question.base, init="pretrained", revision=None)
    if "model" not in options:
        raise OptionError(
            f"{question.source} does not say which model it was trained on, because a loaded model was given. Add "
            "--base NAME."
        )
    if options["init"] == "random" and has_adapters and not question.is_merged:
        raise OptionError(
            "These adapters belong to random weights, which cannot be loaded elsewhere. Add --merge to write base and "
            "adapters as one model."
        )
    if has_adapters and not any(options["lora"].get(field) for field in ("target_modules", "target_parameters")):
        # Checkpoints hold the names of default targets. Those of earlier versions do not, whose default was all-linear.
        options["lora"] = {**options["lora"], "target_modules": "all-linear"}
    options["accept_other_base"] = question.accepts_other_base
    # The master dtype of a sharded run is not needed here.
    options["master_dtype"] = "auto"
    notes = []
    if not has_adapters:
        options["dtype"] = _dtype_of(content["state_dict"])
    elif question.is_merged:
        options["dtype"] = _merge_dtype(question, options)
    # Random weights are recreated from the seed of the run.
    torch.manual_seed(trained["seed"])
    module = FineTuner(**options).to(question.device)
    if question.is_merged and options.get("quantization") is not None:
        assert module.source is not None
        notes.append(
            f"merged into the weights of {module.source.name} dequantised from NF4 to {options['dtype']}, as in "
            "training; they differ from the original weights by the 4-bit rounding"
        )
        _register_dequantise(module)
    module.configure_model()
    module.on_load_checkpoint(content)
    module.load_state_dict(content["state_dict"], strict=not has_adapters)
    # Remove low-precision copies of the adapters, so that the model computes as PEFT does.
    module.teardown("export")
    return module, notes


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint; refuse those whose model cannot be written from here."""
    from lightning_fastft.checkpoint.files import load_file
    from lightning_fastft.training.reward import HEAD

    content = load_file(path, map_location="cpu")
    if content.get("fastft_base") is None or "hyper_parameters" not in content:
        raise OptionError(
            f"{path} is not a checkpoint of a FineTuner. Save other modules with their model's save_pretrained."
        )
    if {f"model.{HEAD}.weight", f"model.base_model.model.{HEAD}.weight"} & content["state_dict"].keys():
        raise OptionError(
            f"{path} holds a reward model, whose head fastft export does not write. In Python: "
            f"RewardTuner.load_from_checkpoint({str(path)!r}).save_pretrained(FOLDER) writes a sequence "
            "classifier."
        )
    return content


def _open_folder(question: _Question) -> tuple[FineTuner, list[str]]:
    """Build the base model of a PEFT folder and add the adapters."""
    from lightning_fastft.hf.export import open_adapters, read_base_name
    from lightning_fastft.training.fine_tuner import FineTuner

    name = question.base or read_base_name(question.source)
    if not name:
        raise OptionError(f"{question.source} does not say which model its adapters belong to. Add --base NAME.")
    dtype = _merge_dtype(question, {"model": name, "dtype": "auto"})
    tokenizer = _tokenizer_of(question.source, base=name)
    base = FineTuner(name, tokenizer=tokenizer, dtype=dtype).to(question.device)  # type: ignore[arg-type]
    is_quantised = _is_bnb(base)
    if question.is_merged and is_quantised:
        _register_dequantise(base)
    base.configure_model()
    module = FineTuner(open_adapters(base.model, question.source), tokenizer=base.tokenizer)
    weights = "dequantised from 4 bits" if is_quantised else "of its files"
    return module, [f"merged into the weights of {name} {weights}, in {dtype}"] if question.is_merged else []


def _register_dequantise(module: FineTuner) -> None:
    from lightning_fastft.hf.export import dequantise

    module.register_transform("dense weights to merge into", dequantise)


def _is_bnb(module: FineTuner) -> bool:
    """Return whether the files of a base are quantised by bitsandbytes."""
    assert module.source is not None
    held = getattr(module.source.config, "quantization_config", None) or {}
    method = held.get("quant_method") if isinstance(held, dict) else getattr(held, "quant_method", None)
    return str(getattr(method, "value", method)) in ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")


def _tokenizer_of(folder: Path, *, base: str) -> str:
    """Return the folder of the tokenizer: that of the adapters, else that of the base."""
    return str(folder) if (folder / "tokenizer_config.json").is_file() else base


def _dtype_of(state_dict: dict[str, torch.Tensor]) -> str:
    """Return the name of the most frequent floating dtype."""
    dtypes = [value.dtype for value in state_dict.values() if value.is_floating_point()]
    return str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.")


def _merge_dtype(question: _Question, options: dict[str, Any]) -> str:
    """Return the dtype of merged weights: the option, that of the run, that of the base's files, or bfloat16."""
    if question.dtype != "auto" or options["dtype"] != "auto":
        return question.dtype if question.dtype != "auto" else str(options["dtype"])
    if options.get("quantization") is not None:
        # The compute dtype of NF4.
        return "bfloat16"
    from lightning_fastft.hf.loading.source import ModelSource

    held = getattr(ModelSource(options["model"], init="random").config.get_text_config(decoder=True), "dtype", None)
    return "bfloat16" if held is None else str(held).removeprefix("torch.")
