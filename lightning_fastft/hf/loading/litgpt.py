"""Convert LitGPT checkpoint folders to Hugging Face folders, and refuse them by name elsewhere."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lightning_fastft.checkpoint.atomic import part_beside
from lightning_fastft.core.errors import (
    DataError,
    MissingDependencyError,
    OptionError,
    UnsafeCheckpointError,
    list_names,
)
from lightning_fastft.hf.export import check_free, disk_errors, share_weights, writing
from lightning_fastft.hf.loading.source import ModelSource, auto_class, find_litgpt

WEIGHTS, LORA_WEIGHTS = "lit_model.pth", "lit_model.pth.lora"
# Files that only LitGPT writes; the others in its folders come from the original model.
_OWN_FILES = ("*.pth", "*.lora", "*.bin", "model_config.yaml", "hyperparameters.yaml", "prompt_style.json", "*.jsonl")
_INPUTS = ("embed_tokens.weight", "embed_in.weight", "wte.weight")
_OUTPUTS = ("lm_head.weight", "embed_out.weight")


def convert_litgpt(folder: Path, out: Path) -> tuple[str, int, int, bool]:
    """Write a LitGPT checkpoint as a Hugging Face folder: safetensors, config.json and the tokenizer's files.

    LitGPT's own converter makes the names of the weights; dtypes and values do not change. transformers then loads the
    folder, and every weight of the model must be present.

    Returns:
        model: Name of the transformers class.
        num_tensors: Tensors in the safetensors files.
        num_bytes: Size of these tensors.
        has_tokenizer: Whether the folder had tokenizer files.

    Raises:
        OptionError: The folder is not a LitGPT checkpoint, lacks a file, or out exists.
        MissingDependencyError: litgpt is not installed; the message has the command.
        UnsafeCheckpointError: lit_model.pth holds more than tensors and plain types, so loading it could run code.
        DataError: The weights do not fit config.json; nothing is written.
        CheckpointNotSavedError: The folder cannot be written.

    Cost:
        The weights on the host twice, and on the disk twice while they are converted.
    """
    check_free(out)
    _check_files(folder)
    with writing(out) as part:
        state = _convert(folder, part)
        for place in folder.iterdir():
            if place.is_file() and not any(map(place.match, _OWN_FILES)) and ".safetensors" not in place.name:
                shutil.copyfile(place, part / place.name)
        _write_config(folder, part, state)
        model = _read_back(part, folder)
        source = ModelSource(str(part))
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        return type(model).__name__, len(state), num_bytes, source.load_tokenizer() is not None


def _check_files(folder: Path) -> None:
    """Refuse a folder that cannot be converted, before anything is loaded."""
    if not folder.is_dir():
        raise OptionError(f"There is no folder {folder} (searched from {Path.cwd()}). Give a LitGPT checkpoint.")
    if find_litgpt(str(folder)) is None and any((folder / name).is_file() for name in (WEIGHTS, LORA_WEIGHTS)):
        raise OptionError(
            f"{folder} has safetensors files too, which are read as they are: --model.model {folder}. If its weights "
            "in LitGPT's format are other ones, move the *.safetensors files away."
        )
    if find_litgpt(str(folder)) is None:
        raise OptionError(f"{folder} is not a LitGPT checkpoint: it has no {WEIGHTS}.")
    if not (folder / WEIGHTS).is_file():
        raise OptionError(
            f"{folder} has only LoRA weights ({LORA_WEIGHTS}). Merge them first: litgpt merge_lora {folder}"
        )
    for name in ("model_config.yaml", "config.json"):
        if not (folder / name).is_file():
            raise OptionError(
                f"{folder} has no {name}. LitGPT copies it from the folder that litgpt download made; copy it from "
                "there, or from the original model on the hub."
            )
    if find_spec("litgpt") is None:
        raise MissingDependencyError(
            "LitGPT's own converter makes the names of the weights, and litgpt is not installed. Run: pip install "
            f"litgpt && fastft convert {folder} OUT"
        )
    kinds = torch.serialization.get_unsafe_globals_in_checkpoint(str(folder / WEIGHTS))
    if kinds:
        raise UnsafeCheckpointError(
            f"{folder / WEIGHTS} holds objects of {list_names(sorted(kinds))}; loading them can run code. Save a plain "
            "state_dict in its place."
        )


def _convert(folder: Path, part: Path) -> dict[str, torch.Tensor]:
    """Return the weights under their names on the hub, written to part."""
    from huggingface_hub import save_torch_state_dict
    from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint

    with part_beside(part / "litgpt", is_folder=True) as scratch:
        # The converter prints its arguments.
        with redirect_stdout(io.StringIO()), disk_errors():
            convert_lit_checkpoint(checkpoint_dir=folder, output_dir=scratch)
        state: dict[str, torch.Tensor] = torch.load(scratch / "model.pth", map_location="cpu", weights_only=True)
    # Copy each tensor, because safetensors refuses shared memory.
    state = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    with disk_errors():
        save_torch_state_dict(state, str(part))
    return state


def _write_config(folder: Path, part: Path, state: dict[str, torch.Tensor]) -> None:
    """Write config.json with the dtype of the weights, and without tying a head that was trained separately."""
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    held = {name.rpartition(".")[0].rpartition(".")[2] + ".weight": tensor for name, tensor in state.items()}
    inputs, outputs = (next((held[name] for name in names if name in held), None) for names in (_INPUTS, _OUTPUTS))
    if inputs is not None and outputs is not None and not torch.equal(inputs, outputs):
        content["tie_word_embeddings"] = False
    content.pop("torch_dtype", None)
    content["dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    (part / "config.json").write_text(json.dumps(content, indent=2), encoding="utf-8")
    share_weights(part)


def _read_back(part: Path, folder: Path) -> Any:
    """Return the model that transformers loads from the new folder; refuse one whose weights differ from those
    written.
    """
    config = ModelSource(str(part / "config.json"), init="random").config
    try:
        model, info = auto_class(config).from_pretrained(str(part), output_loading_info=True)
    except (RuntimeError, ValueError) as error:
        raise DataError(f"The weights of {folder} do not fit its config.json: {error!s:.500}") from error
    wrong = [str(name) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in info[kind]]
    if wrong:
        raise DataError(f"The weights of {folder} do not fit its config.json: {list_names(wrong)}.")
    return model
