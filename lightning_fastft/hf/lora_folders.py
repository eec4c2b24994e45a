"""Start from folders of PEFT adapters: continue one of them, and keep others active and frozen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.core.errors import DataError, OptionError, describe_mismatch
from lightning_fastft.hf.added_tokens import embedding_names, find_resized
from lightning_fastft.hf.lora import parse_lora, without_pattern_warning
from lightning_fastft.hf.lora_init import ADAPTER, changes_base
from lightning_fastft.hf.read_back import ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

    from lightning_fastft.hf.loading.source import ModelSource

CONFIG = "adapter_config.json"


def read_adapter_config(folder: str) -> LoraConfig:
    """Return the configuration of the LoRA adapters in a folder, to train them on.

    Raises:
        OptionError: The folder holds no LoRA adapters in safetensors, or their base was changed and not saved.
    """
    from peft import LoraConfig, PeftConfig

    missing = [name for name in (CONFIG, ADAPTER_WEIGHTS) if not (Path(folder) / name).is_file()]
    if missing:
        raise OptionError(
            f"{folder} has no {' and no '.join(missing)}. Give a local folder of PEFT adapters in safetensors."
        )
    lora = PeftConfig.from_pretrained(folder)
    if not isinstance(lora, LoraConfig):
        raise OptionError(f"{folder} holds adapters of the kind {lora.peft_type}; only LoRA is trained.")
    if changes_base(lora) or lora.init_lora_weights in ("corda", "lora_ga"):
        raise OptionError(
            f"{folder} holds adapters of init_lora_weights={lora.init_lora_weights!r}, which fit only a base that was "
            "changed. Convert them with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)."
        )
    lora.init_lora_weights, lora.inference_mode, lora.eva_config, lora.loftq_config = True, False, None, {}
    # PEFT writes the class of the base here; it is never imported.
    lora.auto_mapping = None
    return parse_lora(lora)


def check_adapter_base(folder: str, *, base: Any, source: ModelSource | None, accept_other: bool) -> None:
    """Refuse adapters of a base with another name, or of another revision of it on the hub.

    The last part of a path or hub id decides. A base that was given as a model, without a source, may have any
    revision.

    Raises:
        OptionError: The names or revisions differ, and accept_other is False.
    """
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(folder)
    trained_on, present = str(config.base_model_name_or_path or ""), str(base.name_or_path)
    if not trained_on or not present or accept_other:
        return
    if Path(trained_on).name != Path(present).name:
        raise OptionError(
            f"The adapters in {folder} were trained on {trained_on}, and the base of this run is {present}. Give that "
            "base, or accept this one with FineTuner(accept_other_base=True)."
        )
    if source is None or trained_on != present or Path(present).exists():
        return
    revision = config.revision or "main"
    if revision != (source.revision or "main"):
        raise OptionError(
            f"The adapters in {folder} were trained on revision {revision!r} of {trained_on}, and this run has loaded "
            f"{source.revision or 'main'!r}. Give FineTuner(revision={revision!r}), --model.revision {revision}, or "
            "accept this base with accept_other_base=True."
        )


def load_adapter(model: PeftModel, folder: str) -> None:
    """Load the weights of a folder into the adapter that is trained; not those of modules that its configuration saves
    whole and that of the model does not, such as the head of a reward model.

    Raises:
        DataError: They do not fit the model; the message names them.
    """
    from peft import set_peft_model_state_dict
    from peft.utils.save_and_load import load_peft_weights

    kept = getattr(model.peft_config[ADAPTER], "modules_to_save", None) or ()
    dropped = [name for name in read_adapter_config(folder).modules_to_save or () if name not in kept]
    _check_names(model, folder, adapter=ADAPTER, dropped=dropped)
    copies = set(embedding_names(model, with_tied=True)) - set(find_resized(model))
    state = {
        name: value
        for name, value in load_peft_weights(folder, device="cpu").items()
        if name not in copies and not _is_inside(name, dropped)
    }
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    try:
        set_peft_model_state_dict(model, state)
    except RuntimeError as error:
        raise _misfit(folder, describe_mismatch(error) or str(error)) from error
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes[name])


def _is_inside(name: str, modules: Sequence[str]) -> bool:
    """Return whether a weight belongs to one of some modules, given by the ends of their names."""
    return name.rpartition(".")[0].endswith(tuple(f".{module}" for module in modules))


def _check_names(model: PeftModel, folder: str, *, adapter: str, dropped: Sequence[str] = ()) -> None:
    """Refuse a folder with other weights than an adapter of the model, apart from those of dropped modules.

    PEFT adds the base's embedding and head to adapters of these layers, which are read if they are those of the model.

    Raises:
        DataError: Weights are missing in the folder, or unknown to the model, or those of another base.
    """
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    with safe_open(str(Path(folder) / ADAPTER_WEIGHTS), framework="pt") as file:
        held = set(file.keys())
    held -= {name for name in held if _is_inside(name, dropped)}
    own = set(get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False))
    resized = held.intersection(find_resized(model)) if adapter == ADAPTER else set()
    copies = held.intersection(embedding_names(model, with_tied=True)) - own - resized
    own |= resized | copies
    others = [name for name in sorted(copies) if not _is_of_base(model, folder, name=name)]
    if others:
        raise DataError(
            f"{folder} holds {others[0]}, a weight of the base that PEFT saved with the adapters, and it is not that "
            "of the model, or fastft_fsdp has not read that yet. Give the base that they were trained on, or save them "
            "with save_pretrained(..., save_embedding_layers=False)."
        )
    for names, state in ((own - held, "missing in it"), (held - own, "unknown to the model")):
        if names:
            raise _misfit(folder, f"{len(names)} weights are {state}, such as {min(names)}")


def _is_of_base(model: PeftModel, folder: str, *, name: str) -> bool:
    """Return whether a file of adapters has a weight of the base as the model has it, possibly in a wider dtype."""
    from safetensors import safe_open

    present = dict(model.named_parameters(remove_duplicate=False))[name].detach().cpu()
    with safe_open(str(Path(folder) / ADAPTER_WEIGHTS), framework="pt") as file:
        found = file.get_tensor(name)
    if found.shape != present.shape:
        return False
    return torch.equal(found.to(present.dtype), present) or torch.equal(found, present.to(found.dtype))


def _misfit(folder: str, found: str) -> DataError:
    return DataError(
        f"The adapters in {folder} do not fit the model: {found}. Give the base that they were trained on, which their "
        f"{CONFIG} names."
    )


def add_frozen_adapters(model: PeftModel, folders: Sequence[str]) -> None:
    """Add adapters that are active in every forward and never trained or saved; they are named frozen0, frozen1, ...

    Raises:
        OptionError: A folder holds no adapters, or holds whole modules too.
        DataError: They do not fit the model.
    """
    names = [f"frozen{number}" for number in range(len(folders))]
    for name, folder in zip(names, folders):
        lora = read_adapter_config(folder)
        if lora.modules_to_save or lora.trainable_token_indices or model.peft_config[ADAPTER].modules_to_save:  # type: ignore[union-attr]
            raise OptionError(
                f"{folder} cannot be active together with the trained adapter, because one of them holds whole "
                "modules or tokens. Merge it into the base first: fastft export --merge."
            )
        try:
            with without_pattern_warning(model, lora):
                model.load_adapter(folder, adapter_name=name, is_trainable=False, torch_device="cpu")
        except RuntimeError as error:
            raise _misfit(folder, describe_mismatch(error) or str(error)) from error
        except ValueError as error:
            raise _misfit(folder, str(error)) from error
        # PEFT accepts weights that are missing or unknown.
        _check_names(model, folder, adapter=name)
    model.base_model.set_adapter([ADAPTER, *names])
    for parameter_name, parameter in model.named_parameters():
        if any(f".{name}" in parameter_name for name in names):
            parameter.requires_grad_(False)
