"""Save embedding and head with adapters whose base got rows for added tokens in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.lora_targets import OWNED_BY_ADAPTER

if TYPE_CHECKING:
    from peft import PeftModel

    from lightning_fastft.hf.lora_init import Initial


def find_resized(model: PeftModel) -> list[str]:
    """Return the names of the base's embedding and head weights if the base's files have another vocabulary size.

    Only local files are read. A base without a local configuration counts as unchanged.
    """
    base: Any = model.get_base_model()
    try:
        # Another revision than the one that was loaded may not be there, or have other rows.
        revision = next(iter(model.peft_config.values())).revision or "main"
        on_disk = type(base.config).from_pretrained(base.name_or_path, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return []
    # Not the rows of the embedding: those of mllama and moshi are more than their vocabulary.
    saved, present = (config.get_text_config(decoder=True).vocab_size for config in (on_disk, base.config))
    if saved == present:
        return []
    return embedding_names(model)


def embedding_names(model: PeftModel, *, with_tied: bool = False) -> list[str]:
    """Return the names of the base's embedding and head weights; a tied weight has one name, or both with_tied."""
    base: Any = model.get_base_model()
    layers = {id(layer) for layer in (base.get_input_embeddings(), base.get_output_embeddings())}
    owners = tuple(f"{name}." for name, module in model.named_modules() if id(module) in layers)
    return [
        name
        for name, _ in model.named_parameters(remove_duplicate=not with_tied)
        if name.startswith(owners) and OWNED_BY_ADAPTER.search(name) is None
    ]


def count_rows(embedding: nn.Module) -> int:
    """Return the rows of an embedding, which PEFT may have wrapped.

    The ``weight`` of a layer with trained tokens is computed, which fails where it is sharded.
    """
    own = (parameter for name, parameter in embedding.named_parameters() if not OWNED_BY_ADAPTER.search(f".{name}"))
    weight: Any = next(own, None)
    weight = embedding.weight if weight is None else weight
    return int(weight.shape[0])


def save_resized(
    model: PeftModel,
    file: Path,
    *,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    initial: Initial | None = None,
) -> dict[str, torch.Tensor]:
    """Add the weights of ``find_resized`` to a file of adapters, and return them.

    Stock PEFT reads them onto a base that was resized to the same number of rows. PEFT's own choice asks the hub, and
    skips a head whose embedding has LoRA.

    Raises:
        UnsupportedModelError: An initialisation moved a part of these weights into the adapters.
    """
    from safetensors.torch import load_file, save_file

    names = find_resized(model)
    changed = {} if initial is None else initial.scales
    moved = [name for name in names if name.removesuffix(".base_layer.weight") in changed]
    if moved:
        raise UnsupportedModelError(
            f"{moved[0]} was resized in memory, and the initialisation of the adapters has changed it, so the adapters "
            "fit no base on disk. Save the resized base, and train on its folder."
        )
    held = dict(model.named_parameters()) if state_dict is None else state_dict
    added = {name: held[name].detach().cpu().contiguous() for name in names}
    if added:
        save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    return added
