"""Write an opened model with its model card as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning_fastft.cli.trained.card import facts_of, render_card
from lightning_fastft.cli.trained.opening import Opened, Request, open_trained
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.files import find_write_obstacle
from lightning_fastft.hf.export import Exported, check_free, export_adapters, export_merged

Kind = Literal["adapters", "merged weights", "all weights"]


def write_trained(
    request: Request, out: Path, *, title: str = "", is_for_vllm: bool = False
) -> tuple[Opened, Kind, Exported, int | None]:
    """Open a trained model, write it to a new folder, and compare what stock libraries read back.

    is_for_vllm refuses adapters of which vLLM would not read a part. The title is that of the model card, by default
    base and method.

    Returns:
        opened: The model; it cannot be used afterwards.
        kind: What the folder holds.
        exported: Files, and the comparison with the trained model.
        max_lora_rank: ``--max-lora-rank`` of vLLM; None unless asked for, and for whole weights.

    Raises:
        OptionError: out exists or cannot be written to, or the adapters belong to random weights or were trained beside
            frozen ones, and are not merged.
        UnsupportedModelError: vLLM would not read all of the adapters.
        CheckpointNotSavedError: The folder cannot be written or reads back differently; it is removed.
    """
    check_free(out)
    if obstacle := find_write_obstacle(out):
        raise OptionError(f"{out} cannot be written: {obstacle}. Name another folder.")
    opened = open_trained(request._replace(is_exported=True))
    module = opened.module
    is_merged = request.is_merged and module.has_adapters
    max_lora_rank = None
    if not is_merged:
        if module.hparams.get("frozen_adapters"):
            raise OptionError(
                f"The adapters in {request.source} were trained with frozen ones and fit only a base that has those. "
                "Add --merge to write the base with all adapters."
            )
        module.to_plain_lora()
    if is_for_vllm and module.has_adapters and not is_merged:
        from lightning_fastft.hf.read_back import check_for_vllm

        max_lora_rank = check_for_vllm(module.model)
    kind: Kind = "merged weights" if is_merged else "adapters" if module.has_adapters else "all weights"
    export = export_adapters if kind == "adapters" else export_merged
    card = render_card(facts_of(opened, kind=kind), title=title)
    companions: dict[str, Any] = {"tokenizer": module.tokenizer, "images": opened.images, "card": card}
    if kind == "adapters" and module.answer_end is not None:
        companions["generation"] = module.model.generation_config
    exported = export(module.model, out, **companions)
    return opened, kind, exported, max_lora_rank
