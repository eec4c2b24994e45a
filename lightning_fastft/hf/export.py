"""Export trained models as plain Hugging Face folders of adapters or merged weights, and load them back to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lightning_fastft.checkpoint.atomic import part_beside, replacing, sweep, sync_folder, sync_tree
from lightning_fastft.core.errors import (
    CheckpointNotSavedError,
    DataError,
    OptionError,
    UnsupportedModelError,
    list_names,
)
from lightning_fastft.hf.added_tokens import save_resized
from lightning_fastft.hf.companions import write_companions
from lightning_fastft.hf.expert_nf4_tensor import ExpertsNF4
from lightning_fastft.hf.loading.source import auto_class
from lightning_fastft.hf.lora import trained_adapters, without_pattern_warning
from lightning_fastft.hf.lora_init import ADAPTER, Initial, convert_config, convert_state
from lightning_fastft.hf.lora_targets import find_lost_names
from lightning_fastft.hf.merge import is_tied, logits_of, merge
from lightning_fastft.hf.read_back import ADAPTER_WEIGHTS, check_read_back

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

    from lightning_fastft.hf.images import ImageEncoder

NUM_PROBE_TOKENS = 16
# Kernels and weights are the same, so logits of the loaded model can differ only by the order of sums.
RELOAD_ULPS = 4


class Exported(NamedTuple):
    """The files written, and their distance from the trained model.

    Args:
        num_tensors: Number of tensors of the adapters or the model.
        num_bytes: Bytes of all files.
        reload_difference: Largest difference of a logit between the trained model and the model that stock libraries
            load.
        merge_difference: Relative distance (root of mean squares) between the logits of the merged model and of the
            adapters; 0 if nothing was merged.
        is_untied: Whether the head no longer shares the weight of the embedding, because adapters changed one of them.
    """

    num_tensors: int
    num_bytes: int
    reload_difference: float
    merge_difference: float
    is_untied: bool = False


def open_adapters(base: PreTrainedModel, folder: Path) -> PeftModel:
    """Return a base with the adapters of a PEFT folder, in evaluation mode.

    Raises:
        OptionError: The folder has no adapters in safetensors.
        DataError: The adapters do not match the base.
    """
    from peft import PeftConfig, PeftModel

    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise OptionError(
            f"{folder} has no {ADAPTER_WEIGHTS}; adapters are read only from safetensors, because other formats can "
            "run code."
        )
    try:
        with without_pattern_warning(base, PeftConfig.from_pretrained(str(folder))):
            return PeftModel.from_pretrained(base, str(folder)).eval()
    except (ValueError, RuntimeError) as error:
        raise DataError(f"The adapters in {folder} do not match {type(base).__name__}: {error}") from error


def read_base_name(folder: Path) -> tuple[str, str | None]:
    """Return the name of the base in a PEFT folder, "" if there is none, and its revision on the hub."""
    from peft import PeftConfig

    config = PeftConfig.from_pretrained(str(folder))
    return str(config.base_model_name_or_path or ""), config.revision


def dequantise(model: PreTrainedModel, *, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model with every NF4 weight dequantised to its compute dtype, and then all weights cast to a dtype.

    Weights that the model holds in another dtype than its own, such as routers in fp32, and buffers are not cast.

    Cost:
        Memory for the dense weights on the device of the model.
    """
    held = model.dtype
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if isinstance(parameter, ExpertsNF4):
                module._parameters[name] = nn.Parameter(parameter.dense(), requires_grad=False)
    if getattr(model, "hf_quantizer", None) is not None:
        model = model.dequantize(dtype=held)
    for parameter in model.parameters():
        if parameter.dtype is held:
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def check_readable(model: PeftModel) -> None:
    """Raise on adapters that stock PEFT would load under other names, which silently loses them.

    Raises:
        UnsupportedModelError: PEFT would lose adapters; the message has their names.

    Cost:
        Host work on names; no tensor is copied.
    """
    lost: set[str] = set()
    for adapter, config in model.peft_config.items():
        held = [
            name.replace(f".{adapter}.", ".").removesuffix(f".{adapter}")
            for name, _ in model.named_parameters()
            if ".lora_" in name and f".{adapter}" in name
        ]
        lost |= find_lost_names(model, held, lora=config)  # type: ignore[arg-type]
    if lost:
        raise UnsupportedModelError(
            f"{type(model.get_base_model()).__name__}: PEFT would not find {list_names(sorted(lost))} when it loads "
            "the adapters, so they would be lost. "
            "Resume from the Trainer's checkpoint, which has them, or train without adapters on these layers (lora's "
            "exclude_modules)."
        )


def save_adapters(
    model: PeftModel,
    folder: Path,
    *,
    state_dict: dict[str, torch.Tensor] | None = None,
    initial: Initial | None = None,
    finish: Callable[[Path], None] = lambda part: None,
) -> None:
    """Write the trained adapters as a plain PEFT folder; stock PEFT reads the new files back before they replace the
    old ones.

    As in PEFT, the adapter "default" is written to the folder itself, any other to a subfolder of its name. Adapters
    that are not trained are written only where none is trained. The state_dict is the gathered one of a sharded model.
    ``initial`` are the first adapters where their initialisation changed the base; plain LoRA is written then.
    ``finish`` is called with the new files in a temporary folder, before they replace the old ones.

    Raises:
        CheckpointNotSavedError: The adapters cannot be written, or differ when read back; the folder does not change.

    Cost:
        Host memory for two copies of the adapters.
    """
    with replacing(folder) as part, _saved_as_plain(model, initial=initial), disk_errors():
        if initial is not None:
            state_dict = convert_state(state_dict or dict(model.named_parameters()), initial=initial)
        names = trained_adapters(model)
        model.save_pretrained(str(part), save_embedding_layers=False, state_dict=state_dict, selected_adapters=names)
        for name in names:
            place = part if name == ADAPTER else part / name
            save_resized(model, place / ADAPTER_WEIGHTS, state_dict=state_dict, initial=initial)
            share_weights(place)
            check_read_back(model, place, adapter=name, state_dict=state_dict)
        finish(part)


def share_weights(folder: Path) -> None:
    """Give the weight files of a new folder the permissions of its configuration.

    safetensors 0.8 lets only their owner read them, whatever the umask: a server of another user does not find them.
    """
    mode = next(folder.glob("*config.json")).stat().st_mode
    for file in folder.glob("*.safetensors"):
        if file.stat().st_mode != mode:
            file.chmod(mode)


@contextmanager
def _saved_as_plain(model: PeftModel, *, initial: Initial | None) -> Iterator[None]:
    """Give a model the configuration of converted adapters inside a block."""
    lora: Any = model.peft_config.get(ADAPTER)
    if initial is not None:
        model.peft_config[ADAPTER] = convert_config(lora)
    try:
        yield
    finally:
        if initial is not None:
            model.peft_config[ADAPTER] = lora


def export_adapters(
    model: PeftModel,
    out: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    images: ImageEncoder | None = None,
    generation: GenerationConfig | None = None,
    card: str = "",
) -> Exported:
    """Write a plain PEFT folder with adapters, tokenizer and processor of images.

    PEFT reads generation options from the base; those given here are for other readers. Then stock PEFT loads the
    folder onto the base, and the logits must be the same. The model cannot be used afterwards.

    Raises:
        OptionError: out exists.
        CheckpointNotSavedError: The folder cannot be written, or loads with other logits; no files are left.

    Cost:
        Two forwards of 16 tokens; no second copy of the base.
    """
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    check_free(out)
    ids, before = _probe(model)
    with writing(out) as part:
        base: Any = model.get_base_model()
        for config in model.peft_config.values():
            # The base of loaded adapters may have moved since they were saved.
            if base.name_or_path and base.name_or_path != config.base_model_name_or_path:
                config.base_model_name_or_path, config.revision = base.name_or_path, None
        with disk_errors():
            model.save_pretrained(str(part), save_embedding_layers=False)
            resized = save_resized(model, part / ADAPTER_WEIGHTS)
        share_weights(part)
        write_companions(part, tokenizer=tokenizer, images=images, generation=generation)
        _write_card(part, card)
        expected = {**get_peft_model_state_dict(model, save_embedding_layers=False), **resized}
        found = load_file(part / ADAPTER_WEIGHTS)
        _compare_tensors(expected, found, out=out)
        # With duplicates: loading unties a head of which a copy is trained, and its weight then has a name of its own.
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters(remove_duplicate=False)}
        with without_pattern_warning(model, PeftConfig.from_pretrained(str(part))):
            again = PeftModel.from_pretrained(model.unload(), str(part))
        for name, parameter in again.named_parameters():
            # PEFT casts bf16 adapters to fp32, which computes differently from training.
            parameter.data = parameter.data.to(dtypes[name])
        difference = _compare_logits(before, logits_of(again, ids), out=out)
        return Exported(len(found), _num_bytes(part), difference, 0.0)


def export_merged(
    model: PeftModel | PreTrainedModel,
    out: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    images: ImageEncoder | None = None,
    card: str = "",
) -> Exported:
    """Write a plain transformers folder with all weights, adapters merged, tokenizer, processor of images and
    generation configuration.

    Stock transformers reads it back: keys, dtypes and logits must be the same, and logits must match the adapters
    within the rounding of the dtype. The model must be dense, and cannot be used afterwards.

    Raises:
        OptionError: out exists.
        UnsupportedModelError: Merging changed logits by more than the rounding of the dtype explains; no files are
            left.
        CheckpointNotSavedError: The folder cannot be written, or loads with other logits; no files are left.

    Cost:
        Four forwards of 16 tokens; host memory for two copies of the model while it is read back.
    """
    check_free(out)
    ids, before = _probe(model)
    was_tied = is_tied(model)
    merged, moved = (model, 0.0) if not hasattr(model, "peft_config") else merge(model, ids, adapted=before)  # type: ignore[arg-type]
    before = logits_of(merged, ids)
    with writing(out) as part:
        with disk_errors():
            merged.save_pretrained(str(part))
        share_weights(part)
        write_companions(part, tokenizer=tokenizer, images=images)
        _write_card(part, card)
        again, report = auto_class(merged.config).from_pretrained(
            str(part), dtype="auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
        wrong = [*report["missing_keys"], *report["unexpected_keys"], *(key for key, *_ in report["mismatched_keys"])]
        if wrong:
            raise CheckpointNotSavedError(
                f"{out} was not written: stock transformers reads other keys or shapes than were saved: "
                f"{list_names(wrong)}."
            )
        _compare_tensors(merged.state_dict(), again.state_dict(), out=out)
        difference = _compare_logits(before, logits_of(again.to(ids.device), ids), out=out)
        is_untied = was_tied and not is_tied(merged)
        return Exported(_num_tensors(again), _num_bytes(part), difference, moved, is_untied)


def check_free(out: Path) -> None:
    """Raise if a path exists.

    Raises:
        OptionError: The path exists.
    """
    if out.exists() or out.is_symlink():
        raise OptionError(f"{out} already exists and is not overwritten. Name another folder, or remove it first.")


@contextmanager
def writing(out: Path) -> Iterator[Path]:
    """Yield a temporary folder next to out; rename it to out if the block succeeds, else remove it.

    What a killed process left of an earlier attempt is removed first.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out.parent, name=out.name)
        with part_beside(out, is_folder=True) as part:
            yield part
            sync_tree(part)
            check_free(out)
            part.rename(out)
        sync_folder(out.parent)
    except CheckpointNotSavedError:
        raise
    except OSError as error:
        raise CheckpointNotSavedError(
            f"{out} was not written: {error}. Nothing is left there. Give a folder that can be written to, on a disk "
            "with enough space."
        ) from error


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raise a full disk as OSError, which safetensors and torch.save report as errors of their own."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        if "I/O error" not in str(error):
            raise
        raise OSError(str(error)) from error
    except RuntimeError as error:
        # The end of a zip archive of torch is not where it should be.
        if "inline_container" not in str(error):
            raise
        raise OSError(f"torch.save was cut short ({error})") from error


def _write_card(part: Path, card: str) -> None:
    if card:
        (part / "README.md").write_text(card, encoding="utf-8")


def _num_tensors(model: nn.Module) -> int:
    """Return the number of tensors of a model; a head that is the embedding is one with it."""
    return len({id(tensor) for tensor in model.state_dict(keep_vars=True).values()})


def _probe(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one batch of token ids, the same for every run, and the logits of the model for it."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.weight.shape[0], (1, NUM_PROBE_TOKENS), generator=draws).to(embedding.weight.device)
    return ids, logits_of(model, ids)


def _compare_tensors(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], *, out: Path) -> None:
    """Raise if the tensors of a folder have other names, dtypes or values than expected."""
    wrong = sorted(set(expected) ^ set(found))
    for name in set(expected) & set(found):
        one, other = expected[name], found[name]
        if one.dtype is not other.dtype or not torch.equal(one.detach().cpu(), other.cpu()):
            wrong.append(f"{name} ({one.dtype} {tuple(one.shape)} written, {other.dtype} {tuple(other.shape)} read)")
    if wrong:
        raise CheckpointNotSavedError(f"{out} was not written: {list_names(wrong)} differ when read back.")


def _compare_logits(expected: torch.Tensor, found: torch.Tensor, *, out: Path) -> float:
    """Return the largest difference of a logit; raise if the order of sums does not explain it."""
    difference = float((expected - found).abs().max())
    allowed = RELOAD_ULPS * torch.finfo(torch.float32).eps * float(expected.abs().max())
    # NaN must raise too, hence "not <=".
    if not difference <= allowed:
        raise CheckpointNotSavedError(
            f"{out} was not written: stock libraries read it back with logits that differ by {difference:.1e}, and "
            f"rounding explains at most {allowed:.1e}."
        )
    return difference


def _num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
