"""Build the model of a checkpoint, of a PEFT folder or of a whole model's folder."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_fastft.cli.words import name_checkpoint
from lightning_fastft.core.checks import local_path
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.files import read_json_object
from lightning_fastft.core.phases import phase

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace

    import torch

    from lightning_fastft.hf.images import ImageEncoder
    from lightning_fastft.hf.loading.source import ModelSource
    from lightning_fastft.training.fine_tuner import FineTuner

# Key of a checkpoint: the command of its run.
COMMAND_KEY = "fastft_command"
# Messages of a base or tokenizer that is not where its name says.
_UNREAD = re.compile(r"The (configuration|tokenizer) of .* cannot be|There is no folder or file .* Correct (\w+)\.")
# Reward models by PEFT's name of their task.
_CLASSIFIERS = {"SEQ_CLS": "SequenceClassification", "TOKEN_CLS": "TokenClassification"}


class Request(NamedTuple):
    """What to open, and how.

    Args:
        source: A checkpoint file, a PEFT folder or the folder of a whole model.
        device: Where the model is built.
        is_merged: Whether the adapters will be merged, for which a base in 4 bits is made dense.
        is_exported: Whether the model is written, to be loaded elsewhere.
        takes_whole: Whether a model without adapters is taken as it is, merged or not.
        base: The base model, if it has moved since training; "" for the one of the run.
        dtype: Dtype of merged or whole weights; "auto" for that of the run or the files.
        accepts_other_base: Whether a base with other weights than those of the run is accepted.
        tokenizer: The tokenizer, if it has moved since training; "" for the one of the run or folder.
    """

    source: Path
    device: torch.device
    is_merged: bool = False
    is_exported: bool = False
    takes_whole: bool = True
    base: str = ""
    dtype: str = "auto"
    accepts_other_base: bool = False
    tokenizer: str = ""


class Opened(NamedTuple):
    """A built model, and what is known of its run.

    Args:
        module: The module with its model, in evaluation mode; adapters are not merged yet.
        notes: Remarks for the user.
        record: A checkpoint's hyperparameters, ``describe_run`` and command; empty for folders.
        base: Name of the base model, or of the model itself.
        revision: Revision of the base on the hub; None for its default branch.
        images: The processor of images; None if there is none.
    """

    module: FineTuner
    notes: list[str]
    record: dict[str, Any]
    base: str
    revision: str | None
    images: ImageEncoder | None


def add_options(arguments: ArgumentParser) -> None:
    """Add the options that all commands on checkpoints have."""
    arguments.add_argument("--base", default="")
    arguments.add_argument("--tokenizer", default="")
    arguments.add_argument("--device", default="")
    arguments.add_argument("--accept-other-base", action="store_true")


def check_source(name: str) -> Path:
    """Return the path of a checkpoint or folder, without torch.

    Raises:
        OptionError: There is nothing.
    """
    source = local_path(name, use="read from")
    if not source.exists():
        raise OptionError(
            f"There is nothing at {source} (searched from {Path.cwd()}). Give a checkpoint or a folder of adapters."
        )
    if not (source / "config.json").is_file() and (inside := name_checkpoint(source)):
        raise OptionError(f"{source} is a folder with checkpoints. Name one of them: {inside}")
    return source


def find_device(name: str) -> torch.device:
    """Return the device of ``--device``; "auto" is the GPU where there is one.

    Raises:
        OptionError: torch has no such device.
    """
    # Imported late: other mistakes are answered without torch.
    with phase("importing torch"):
        import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"--device must be a device of torch, got {name!r}: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"--device {name}: torch sees no GPU. Use --device cpu, or look at nvidia-smi.")
    return device


def read_request(given: Namespace, *, device: str = "auto", **choices: Any) -> Request:
    """Return the request of a parsed command line that has ``add_options``.

    choices are further fields of the request.

    Raises:
        OptionError: There is nothing at source, or torch has no device ``--device``.
    """
    source = check_source(given.source)
    place = find_device(given.device or device)
    moved = {"base": given.base, "tokenizer": given.tokenizer}
    return Request(source, place, accepts_other_base=given.accept_other_base, **moved, **choices)


def read_task(folder: Path) -> str:
    """Return "CausalLM", or the kind of classifier in a folder of adapters or of a whole model.

    Raises:
        OptionError: The configuration is no JSON object.
    """
    adapters, whole = folder / "adapter_config.json", folder / "config.json"
    if adapters.is_file():
        task_type = str(read_json_object(adapters).get("task_type"))
        return _CLASSIFIERS.get(task_type, "CausalLM")
    config = read_json_object(whole) if whole.is_file() else {}
    names = config.get("architectures") or ()
    return next((task for task in _CLASSIFIERS.values() for name in names if name.endswith(f"For{task}")), "CausalLM")


def open_trained(request: Request) -> Opened:
    """Return a module with its built model and adapters.

    Raises:
        OptionError: The source is of another kind, or its base is not known.
        DamagedCheckpointError: The checkpoint does not match its digest.
        ResumeError: The checkpoint does not fit the model that it names, or the base has other weights.
    """
    source = request.source
    with phase("importing transformers"):
        import lightning_fastft.training.fine_tuner  # noqa: F401
    if source.is_file() or (source / "meta.pt").is_file():
        return _open_on_base(_open_checkpoint, request)
    if (source / "adapter_config.json").is_file():
        return _open_on_base(_open_adapters, request)
    if (source / "config.json").is_file() and request.takes_whole:
        return _open_whole(request)
    if (source / "config.json").is_file():
        raise OptionError(f"{source} is a whole model already, so there is nothing to export.")
    raise OptionError(
        f"{source} is neither a checkpoint of a FineTuner nor a folder with an adapter_config.json or a config.json."
    )


def _open_on_base(open_source: Callable[[Request], Opened], request: Request) -> Opened:
    """Return what open_source returns; say how to name a base or tokenizer that is not where the source says."""
    try:
        return open_source(request)
    except OptionError as error:
        found = _UNREAD.match(str(error))
        option = "base" if found is None or "tokenizer" not in found.groups() else "tokenizer"
        if found is None:
            raise
        if getattr(request, option):
            named = re.sub(r"Correct (model|tokenizer)\.$", f"Correct --{option}.", str(error))
            raise OptionError(f"--{option}: {named}") from error
        raise OptionError(
            f"{error} {request.source} names this {option}; a folder is searched from {Path.cwd()}. If it is "
            f"elsewhere, add --{option} FOLDER."
        ) from error


def _open_checkpoint(request: Request) -> Opened:
    """Build the model of a checkpoint and load its trained weights."""
    import torch

    from lightning_fastft.hf.generation import add_stop
    from lightning_fastft.training.fine_tuner import FineTuner
    from lightning_fastft.training.model.construction import find_base
    from lightning_fastft.training.model.run_record import RUN_KEY

    content = _read_checkpoint(request.source)
    if request.tokenizer:
        content["datamodule_hyper_parameters"] = {"tokenizer": request.tokenizer}
    options = _tuner_options(request, content)
    has_adapters = options.get("lora") is not None
    dtype, is_quantised = options["dtype"], options.get("quantization") is not None
    is_cast = request.is_merged and has_adapters and (is_quantised or options["init"] == "random")
    if is_cast:
        # NF4 codes and random weights depend on the dtype: they are made in that of the run, and then cast.
        options["dtype"] = content["fastft_base"].get("dtype", dtype)
    # Random weights are recreated from the seed of the run.
    torch.manual_seed(content["fastft_base"]["seed"])
    module = FineTuner(**options).to(request.device)
    assert module.source is not None
    notes = []
    if request.is_merged and has_adapters and is_quantised:
        notes.append(
            f"merged into the weights of {module.source.name} dequantised from NF4 to {dtype}, as in training; they "
            "differ from the original weights by the 4-bit rounding"
        )
    if is_cast:
        _register_dequantise(module, dtype)
    module.configure_model()
    module.on_load_checkpoint(content)
    module.load_state_dict(content["state_dict"], strict=not has_adapters)
    # Remove low-precision copies of the adapters, so that the model computes as PEFT does.
    module.teardown("export")
    if module.answer_end is not None:
        find_base(module.model).generation_config = add_stop(module.model.generation_config, module.answer_end)
    if module.tokenizer is not None:
        module.tokenizer.chat_template = module.trained_tokenizer.chat_template
    record = {name: content.get(name) for name in ("hyper_parameters", RUN_KEY, COMMAND_KEY)}
    return _finish(module, notes, record=record, source=module.source)


def _tuner_options(request: Request, content: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the FineTuner that builds the model of a checkpoint; refuse requests that do not fit it."""
    from lightning_fastft.training.tuner import Tuner

    # Options of the loss belong to the run, not to the model.
    known = inspect.signature(Tuner.__init__).parameters
    options = {name: value for name, value in content["hyper_parameters"].items() if name in known}
    has_adapters = options.get("lora") is not None
    if not has_adapters and any(".lora_" in name for name in content["state_dict"]):
        raise OptionError(
            f"{request.source} holds adapters of a PEFT model that was given, and not their configuration. In Python: "
            f"FineTuner.load_from_checkpoint({str(request.source)!r}, model=PEFT_MODEL).save_pretrained(FOLDER) writes "
            "adapters that this command reads."
        )
    if request.is_merged and not has_adapters and not request.takes_whole:
        raise OptionError(
            f"{request.source} has all weights and no adapters, so there is nothing to merge. Remove --merge."
        )
    if request.base:
        options.update(model=request.base, init="pretrained", revision=None)
    if "model" not in options:
        raise OptionError(
            f"{request.source} does not say which model it was trained on, because a loaded model was given. Add "
            "--base NAME; a model that was changed after it was loaded must be saved first."
        )
    if request.is_exported and options["init"] == "random" and has_adapters and not request.is_merged:
        raise OptionError(
            "These adapters belong to random weights, which cannot be loaded elsewhere. Add --merge to write base and "
            "adapters as one model."
        )
    if has_adapters and not any(options["lora"].get(field) for field in ("target_modules", "target_parameters")):
        # Checkpoints hold the names of default targets. Those of earlier versions do not, whose default was all-linear.
        options["lora"] = {**options["lora"], "target_modules": "all-linear"}
    # The tokens of the run are those of its data.
    options["tokenizer"] = (content.get("datamodule_hyper_parameters") or {}).get("tokenizer") or options.get(
        "tokenizer"
    )
    if options["init"] == "random" and options["dtype"] == "auto":
        # Weights that are drawn in another dtype differ.
        options["dtype"] = content["fastft_base"].get("dtype", "auto")
    options["accept_other_base"] = request.accepts_other_base
    # The master dtype of a sharded run is not needed here.
    options["master_dtype"] = "auto"
    if not has_adapters:
        options["dtype"] = _dtype_of(content["state_dict"]) if request.dtype == "auto" else request.dtype
    elif request.is_merged:
        # A product of factors in bf16 would be rounded before it is added to the weight.
        options.update(dtype=_merge_dtype(request, options), adapter_dtype="float32")
    return options


def _read_checkpoint(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint; refuse those whose model cannot be written from here."""
    from lightning_fastft.checkpoint.files import load_file
    from lightning_fastft.checkpoint.folders import read_folder
    from lightning_fastft.training.reward import HEAD

    # A run of fastft_fsdp writes a folder with the shards of all ranks.
    content = read_folder(path) if path.is_dir() else load_file(path, map_location="cpu")
    if content.get("fastft_base") is None or "hyper_parameters" not in content:
        raise OptionError(
            f"{path} is not a checkpoint of a FineTuner. Save other modules with their model's save_pretrained."
        )
    if {f"model.{HEAD}.weight", f"model.base_model.model.{HEAD}.weight"} & content["state_dict"].keys():
        raise OptionError(
            f"{path} holds a reward model, whose head this command does not read. In Python: "
            f"RewardTuner.load_from_checkpoint({str(path)!r}).save_pretrained(FOLDER) writes a classifier. "
            f"Its accuracy: fastft validate --config CONFIG --ckpt_path {path}"
        )
    return content


def _open_adapters(request: Request) -> Opened:
    """Build the base model of a PEFT folder and add the adapters."""
    from lightning_fastft.hf.export import open_adapters, read_base_name
    from lightning_fastft.hf.generation import add_stop, read_stops
    from lightning_fastft.hf.loading.quantised_files import quantization_method
    from lightning_fastft.hf.loading.source import read_stop_ids
    from lightning_fastft.training.fine_tuner import FineTuner

    if read_task(request.source) != "CausalLM":
        raise OptionError(
            f"{request.source} holds the adapters and the head of a reward model, and this command would drop the "
            "head. Read it with PEFT on a base that AutoModelForSequenceClassification (of steps: "
            "AutoModelForTokenClassification) has loaded with num_labels=1. fastft push without --merge uploads it."
        )
    name, revision = (request.base, None) if request.base else read_base_name(request.source)
    if not name:
        raise OptionError(f"{request.source} does not say which model its adapters belong to. Add --base NAME.")
    dtype = _merge_dtype(request, {"model": name, "revision": revision, "dtype": "auto"})
    has_own = (request.source / "tokenizer_config.json").is_file()
    tokenizer = request.tokenizer or (str(request.source) if has_own else None)
    base = FineTuner(name, revision=revision, tokenizer=tokenizer, dtype=dtype).to(request.device)  # type: ignore[arg-type]
    assert base.source is not None
    method = quantization_method(base.source.config)
    if request.is_merged and method == "bitsandbytes":
        _register_dequantise(base, dtype)
    base.configure_model()
    module = FineTuner(open_adapters(base.model, request.source), tokenizer=base.tokenizer)
    module.given_images = base.image_encoder
    for token in set(read_stops(request.source)).difference(read_stop_ids(base.model.generation_config.eos_token_id)):
        module.answer_end = token
        base.model.generation_config = add_stop(base.model.generation_config, token)
    weights = "as its files hold them" if method is None else f"dequantised ({method})"
    notes = [f"merged into the weights of {name} {weights}, in {dtype}"] if request.is_merged else []
    return _finish(module, notes, record={}, source=base.source)


def _open_whole(request: Request) -> Opened:
    """Build the model of a folder in the dtype of its files."""
    from lightning_fastft.training.fine_tuner import FineTuner

    name = str(request.source)
    dtype = _merge_dtype(request, {"model": name, "dtype": "auto"})
    module = FineTuner(name, dtype=dtype, tokenizer=request.tokenizer or None).to(request.device)  # type: ignore[arg-type]
    module.configure_model()
    return _finish(module, [], record={}, source=module.source)


def _finish(module: FineTuner, notes: list[str], *, record: dict[str, Any], source: ModelSource | None) -> Opened:
    """Set the model to evaluation, without memory for a backward."""
    from lightning_fastft.hf.images import ImageEncoder

    assert source is not None
    if module.image_encoder is None and source.has_processor:
        # A tokenizer of its own may come without the processor of the model.
        module.given_images = ImageEncoder(source)
    module.model.eval()
    module.model.requires_grad_(requires_grad=False)
    return Opened(module, notes, record, source.name, source.revision, module.image_encoder)


def _register_dequantise(module: FineTuner, dtype: str) -> None:
    from lightning_fastft.hf.dtypes import DTYPES
    from lightning_fastft.hf.export import dequantise

    module.register_transform("dense weights to merge into", partial(dequantise, dtype=DTYPES[dtype]))


def _dtype_of(state_dict: dict[str, torch.Tensor]) -> str:
    """Return the name of the most frequent floating dtype."""
    dtypes = [value.dtype for value in state_dict.values() if value.is_floating_point()]
    return str(max(set(dtypes), key=dtypes.count)).removeprefix("torch.")


def _merge_dtype(request: Request, options: dict[str, Any]) -> str:
    """Return the dtype of merged weights: the option, that of the run, that of the base's files, or bfloat16."""
    if request.dtype != "auto" or options["dtype"] != "auto":
        return request.dtype if request.dtype != "auto" else str(options["dtype"])
    if options.get("quantization") is not None:
        # The compute dtype of NF4.
        return "bfloat16"
    from lightning_fastft.hf.loading.source import ModelSource

    config = ModelSource(options["model"], init="random", revision=options.get("revision")).config
    # The text part of a model with an image tower often leaves the dtype to the whole.
    found = (getattr(part, "dtype", None) for part in (config.get_text_config(decoder=True), config))
    held = next((dtype for dtype in found if dtype is not None), None)
    return "bfloat16" if held is None else str(held).removeprefix("torch.")
