"""``fastft export``: what a run has trained, as a plain Hugging Face folder that needs nothing of ours."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_fastft.checkpoint.files import load_file
from lightning_fastft.checkpoint.io import local_path
from lightning_fastft.cli.lightning_cli import take_option
from lightning_fastft.core.checks import check_choice
from lightning_fastft.core.errors import OptionError
from lightning_fastft.training.fine_tuner import FineTuner

HOW = (
    "fastft export CHECKPOINT_OR_FOLDER OUT [--merge] [--base NAME] [--dtype NAME] [--device NAME] "
    "[--accept-other-base]"
)
_MIB = 2**20


class _Question(NamedTuple):
    """What is exported, where to, and how."""

    source: Path
    out: Path
    is_merged: bool
    base: str
    dtype: str
    device: torch.device
    accepts_other_base: bool


def run_export(words: Sequence[str]) -> int:
    """Write the adapters or the merged weights of a checkpoint or a PEFT folder to a new folder, read back and
    compared; return 0.

    Args:
        words: A checkpoint file of a FineTuner or a folder of PEFT adapters, then the folder to write. ``--merge``
            writes the whole model with the adapters in its weights. ``--base NAME`` is the base model where the one
            that was trained on lies elsewhere now. ``--dtype`` is that of merged weights: that of the run; where the
            run chose by itself, bfloat16 on a base in NF4, that of the base's files on another. ``--device`` is where
            the model is built (cpu). ``--accept-other-base`` takes a base with other weights than those of the run.

    Raises:
        OptionError: There is something at the target, nothing at the source, the source is neither, or its base is not
            known.
        DamagedCheckpointError: Bytes of the checkpoint differ from those that were written.
        ResumeError: The checkpoint does not fit the model that it names, or the base has other weights than that of the
            run.
        CheckpointNotSavedError: The folder cannot be written or reads back otherwise; nothing is left of it.

    Cost:
        The base on the device once, for a merge once more on the host while it is read back.
    """
    question = _read_question(words)
    from lightning_fastft.hf.export import check_free, export_adapters, export_merged

    check_free(question.out)
    module, notes = _open(question)
    module.model.eval()
    # An export is no training; what it keeps for a backward would be memory.
    module.model.requires_grad_(requires_grad=False)
    if question.is_merged or not module.has_adapters:
        exported = export_merged(module.model, question.out, tokenizer=module.tokenizer)
    else:
        exported = export_adapters(module.model, question.out, tokenizer=module.tokenizer)
    notes.append(
        "no tokenizer is known, so none is beside it" if module.tokenizer is None else "the tokenizer is beside it"
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
            f"  logits of the merged model lie {exported.merge_difference:.1e} of their size from those with adapters"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _read_question(words: Sequence[str]) -> _Question:
    """Take the words of the command line apart and judge them."""
    flags = ("--merge", "--accept-other-base")
    is_merged, accepts_other_base = (flag in words for flag in flags)
    rest = [word for word in words if word not in flags]
    base, rest = take_option(rest, "--base", default="")
    dtype, rest = take_option(rest, "--dtype", default="auto")
    device, rest = take_option(rest, "--device", default="cpu")
    if len(rest) != 2 or any(word.startswith("-") for word in rest):
        raise OptionError(f"fastft export takes a source and a target, got {' '.join(rest) or 'nothing'}: {HOW}")
    check_choice("--dtype", dtype, ("auto", "bfloat16", "float16", "float32"))
    if dtype != "auto" and not is_merged:
        raise OptionError(
            "--dtype is the dtype of merged weights; adapters and trained weights keep theirs: add --merge, or leave "
            "it away."
        )
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"--device must be a device of torch, got {device!r}: {error}") from error
    source = local_path(rest[0], use="exported from")
    if not source.exists():
        raise OptionError(
            f"There is nothing at {source} (looked from {Path.cwd()}): give a checkpoint file or a folder of adapters."
        )
    return _Question(source, Path(rest[1]), is_merged, base, dtype, place, accepts_other_base)


def _open(question: _Question) -> tuple[FineTuner, list[str]]:
    """Return a module whose model stands, adapters on it, and what is to be said of it."""
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
        raise OptionError(f"{source} holds a whole model already; there is nothing to export.")
    raise OptionError(f"{source} is neither a checkpoint file of a FineTuner nor a folder with an adapter_config.json.")


def _open_checkpoint(question: _Question) -> tuple[FineTuner, list[str]]:
    """Build what a checkpoint was trained on, and load what was trained."""
    content = load_file(question.source, map_location="cpu")
    trained = content.get("fastft_base")
    if trained is None or "hyper_parameters" not in content:
        raise OptionError(
            f"{question.source} is no checkpoint of a FineTuner: save a module of your own by its model's "
            "save_pretrained."
        )
    known = inspect.signature(FineTuner.__init__).parameters
    options = {name: value for name, value in content["hyper_parameters"].items() if name in known}
    has_adapters = options.get("lora") is not None
    if question.is_merged and not has_adapters:
        raise OptionError(
            f"{question.source} holds all weights and no adapters, so there is nothing to merge: leave --merge away."
        )
    if question.base:
        options.update(model=question.base, init="pretrained", revision=None)
    if "model" not in options:
        raise OptionError(
            f"{question.source} does not say which model it was trained on, because that one was given loaded: add "
            "--base NAME."
        )
    if options["init"] == "random" and has_adapters and not question.is_merged:
        raise OptionError(
            "These adapters belong to random weights, which no one else can load: add --merge, which writes base and "
            "adapters as one."
        )
    options["accept_other_base"] = question.accepts_other_base
    # How a sharded run holds its weights means nothing here.
    options["master_dtype"] = "auto"
    notes = []
    if not has_adapters:
        options["dtype"] = _dtype_of(content["state_dict"])
    elif question.is_merged:
        options["dtype"] = _merge_dtype(question, options)
    # Random weights are those of the seed that the run had.
    torch.manual_seed(trained["seed"])
    module = FineTuner(**options).to(question.device)
    if question.is_merged and options.get("quantization") is not None:
        assert module.source is not None
        notes.append(
            f"merged into the weights of {module.source.name} as NF4 holds them, made dense in {options['dtype']}: "
            "what adapters were trained on, "
            "so they differ from the base's own weights by what 4 bits lose"
        )
        _register_dequantise(module)
    module.configure_model()
    module.on_load_checkpoint(content)
    module.load_state_dict(content["state_dict"], strict=not has_adapters)
    # Narrow copies are for training: what leaves computes as PEFT does.
    module.teardown("export")
    return module, notes


def _open_folder(question: _Question) -> tuple[FineTuner, list[str]]:
    """Build the base that a PEFT folder names, and put the adapters on it."""
    from lightning_fastft.hf.export import open_adapters, read_base_name

    name = question.base or read_base_name(question.source)
    if not name:
        raise OptionError(f"{question.source} does not say which model its adapters belong to: add --base NAME.")
    dtype = _merge_dtype(question, {"model": name, "dtype": "auto"})
    base = FineTuner(name, tokenizer=_tokenizer_of(question.source, base=name), dtype=dtype).to(question.device)  # type: ignore[arg-type]
    is_quantised = _is_bnb(base)
    if question.is_merged and is_quantised:
        _register_dequantise(base)
    base.configure_model()
    module = FineTuner(open_adapters(base.model, question.source), tokenizer=base.tokenizer)
    weights = "as 4 bits hold them, made dense" if is_quantised else "as its files hold them"
    return module, [f"merged into the weights of {name} {weights}, in {dtype}"] if question.is_merged else []


def _register_dequantise(module: FineTuner) -> None:
    from lightning_fastft.hf.export import dequantise

    module.register_transform("dense weights to merge into", dequantise)


def _is_bnb(module: FineTuner) -> bool:
    """Whether the files of a base are held in 4 or 8 bits by bitsandbytes."""
    assert module.source is not None
    held = getattr(module.source.config, "quantization_config", None) or {}
    method = held.get("quant_method") if isinstance(held, dict) else getattr(held, "quant_method", None)
    return str(getattr(method, "value", method)) in ("bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit")


def _tokenizer_of(folder: Path, *, base: str) -> str:
    """Return where the tokenizer is: beside the adapters, else beside the base."""
    return str(folder) if (folder / "tokenizer_config.json").is_file() else base


def _dtype_of(state_dict: dict[str, torch.Tensor]) -> str:
    """Return the name of the dtype in which all weights were trained."""
    dtypes = [value.dtype for value in state_dict.values() if value.is_floating_point()]
    return str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.")


def _merge_dtype(question: _Question, options: dict[str, Any]) -> str:
    """Return the dtype of merged weights: asked for, the run's, that of the base's files, or bf16."""
    if question.dtype != "auto" or options["dtype"] != "auto":
        return question.dtype if question.dtype != "auto" else str(options["dtype"])
    if options.get("quantization") is not None:
        # What NF4 computes in on every GPU that has it.
        return "bfloat16"
    from lightning_fastft.hf.loading import ModelSource

    held = getattr(ModelSource(options["model"], init="random").config.get_text_config(decoder=True), "dtype", None)
    return "bfloat16" if held is None else str(held).removeprefix("torch.")
