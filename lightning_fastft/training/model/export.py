"""Files of a trained model that stock PEFT and transformers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning_fastft.hf.images import ImageEncoder
    from lightning_fastft.hf.lora_init import Initial


def save_model(
    model: Any,
    folder: str,
    *,
    tokenizer: Any,
    images: ImageEncoder | None,
    answer_end: int | None,
    is_sharded: bool,
    is_writer: bool,
    has_adapters: bool,
    compute_dtype: torch.dtype,
    initial: Initial | None,
) -> None:
    """Write adapters or a whole model, the tokenizer and the processor of images.

    Sharded weights are gathered, so every rank makes this call.

    Raises:
        UnsupportedModelError: PEFT would not read the adapters back; nothing is written.
        CheckpointNotSavedError: Stock PEFT reads other adapters than were saved; the folder is as before.
    """
    from lightning_fastft.hf.companions import write_companions
    from lightning_fastft.hf.export import check_readable, save_adapters, share_weights
    from lightning_fastft.hf.generation import add_stop

    has_peft = hasattr(model, "peft_config")
    if has_peft:
        check_readable(model)
    state = None
    if is_sharded:
        from lightning_fastft.hf.added_tokens import find_resized
        from lightning_fastft.hf.sharding.state import gather_state

        # Masters leave in the dtype that the model has without them.
        dtype = None if has_adapters else compute_dtype
        is_trained_only = has_adapters and not (has_peft and find_resized(model))
        state = gather_state(model, is_trained_only=is_trained_only, dtype=dtype)
    if not is_writer:
        return
    if has_peft:
        save_adapters(model, Path(folder), state_dict=state, initial=initial)
    else:
        model.save_pretrained(folder, **({} if state is None else {"state_dict": state}))
        if state is not None:
            _name_dtype(Path(folder) / "config.json", compute_dtype)
        share_weights(Path(folder))
    generation = None if answer_end is None else add_stop(model.generation_config, answer_end)
    write_companions(Path(folder), tokenizer=tokenizer, images=images, generation=generation)


def _name_dtype(file: Path, dtype: torch.dtype) -> None:
    """Write the dtype of the saved weights to a configuration, where transformers wrote that of the masters."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["dtype"] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
