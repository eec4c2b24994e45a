"""Files of a trained model that stock PEFT and transformers read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fastft.checkpoint.atomic import replacing
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.files import edited_json

if TYPE_CHECKING:
    from lightning_fastft.training.model.saved import SavedCausalLM


def save_model(module: SavedCausalLM, folder: str) -> None:
    """Write adapters or the whole model of a module, its tokenizer and its processor of images.

    Sharded weights are gathered, so every rank makes this call. The module completes the new files in a temporary
    folder, before they replace earlier ones.

    Raises:
        OptionError: The folder holds a whole model and adapters are saved, or the reverse; nothing is written.
        UnsupportedModelError: PEFT would not read the adapters back; nothing is written.
        CheckpointNotSavedError: The files cannot be written, or stock PEFT reads other adapters than were saved; the
            folder is as before.
    """
    from lightning_fastft.hf.companions import write_companions
    from lightning_fastft.hf.export import check_readable, disk_errors, save_adapters, share_weights
    from lightning_fastft.hf.generation import add_stop

    model, folder = module.model, os.path.expanduser(folder)
    tokenizer, images, answer_end = module.trained_tokenizer, module.image_encoder, module.answer_end
    has_peft = hasattr(model, "peft_config")
    if has_peft:
        check_readable(model)
    state = None
    if module.is_sharded:
        from lightning_fastft.hf.added_tokens import find_resized
        from lightning_fastft.hf.sharding.state import gather_state

        # Masters leave in the dtype that the model has without them.
        dtype = None if module.has_adapters else module._compute_dtype
        is_trained_only = module.has_adapters and not (has_peft and find_resized(model))
        state = gather_state(model, is_trained_only=is_trained_only, dtype=dtype)
    if module._trainer is not None and not module.trainer.is_global_zero:
        return
    _refuse_other_kind(Path(folder), is_adapters=has_peft)

    def complete(part: Path) -> None:
        generation = None if answer_end is None else add_stop(model.generation_config, answer_end)
        write_companions(part, tokenizer=tokenizer, images=images, generation=generation)
        module._finish_files(part)

    if has_peft:
        save_adapters(model, Path(folder), state_dict=state, initial=module.initial_adapters, finish=complete)
    else:
        with replacing(Path(folder)) as part, disk_errors():
            model.save_pretrained(str(part), **({} if state is None else {"state_dict": state}))
            if state is not None:
                # transformers wrote the dtype of the masters.
                with edited_json(part / "config.json") as config:
                    config["dtype"] = str(module._compute_dtype).removeprefix("torch.")
            share_weights(part)
            complete(part)
            names = {path.name for path in part.iterdir()}
        for path in Path(folder).glob("model*.safetensors*"):
            # Shards of an earlier save, or the one file that readers prefer to shards.
            if path.name not in names:
                path.unlink()


def _refuse_other_kind(folder: Path, *, is_adapters: bool) -> None:
    """Refuse adapters in the folder of a whole model, and the reverse: stock transformers reads both as one model."""
    if (folder / ("config.json" if is_adapters else "adapter_config.json")).is_file():
        own, other = ("adapters", "a whole model") if is_adapters else ("a whole model", "adapters")
        raise OptionError(
            f"{folder} holds {other}, and transformers would add the adapters to the model. Save {own} to another "
            "folder; the model of this process is unchanged."
        )
