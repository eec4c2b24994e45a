"""Find copies of attention and of recurrent mixers that PEFT's modules_to_save trains in place of a model's own."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel

from lightning_fastft.hf.mixers import MixerFamily, is_mixer


def find_copied_mixer(decoder: nn.Module, family: MixerFamily | None) -> str:
    """Return why a decoder with a trained copy of attention or of a recurrent mixer cannot be packed; "" without one.

    The copy has a configuration of its own, which does not follow when attention is set for the model.

    Args:
        decoder: The module that holds the decoder layers.
        family: The recurrent mixers of the model; None if it has none.

    Example:
        >>> find_copied_mixer(nn.Linear(2, 2), None)
        ''
    """
    for name, original in _find_copied(decoder):
        if any(
            "Attention" in type(part).__name__ or (family and is_mixer(part, family)) for part in original.modules()
        ):
            linears = {
                path.rpartition(".")[2] for path, part in original.named_modules() if isinstance(part, nn.Linear)
            }
            return (
                f"modules_to_save trains a copy of {name} ({type(original).__name__}), which would not keep documents "
                f"apart; name its linear layers in target_modules instead ({', '.join(sorted(linears))})"
            )
    return ""


def _find_copied(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and original of each copied module; models inside, such as vision towers, are skipped."""
    from peft.utils.other import ModulesToSaveWrapper

    for name, child in module.named_children():
        if isinstance(child, ModulesToSaveWrapper):
            if not isinstance(child.original_module, PreTrainedModel):
                yield f"{prefix}{name}", child.original_module
        elif not isinstance(child, PreTrainedModel):
            yield from _find_copied(child, f"{prefix}{name}.")
