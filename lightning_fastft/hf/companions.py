"""Write what belongs to a model beside its weights: its tokenizer and its processor of images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from lightning_fastft.hf.images import ImageEncoder


def write_companions(
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    images: ImageEncoder | None,
    generation: GenerationConfig | None = None,
) -> None:
    """Write the files of a processor of images, of a tokenizer and of a generation configuration.

    The chat template is that of the tokenizer.

    Args:
        folder: The folder of the weights.
        tokenizer: None writes none.
        images: None writes none.
        generation: None leaves the one that is there.
    """
    if generation is not None:
        generation.save_pretrained(str(folder))
    if images is not None:
        images.save(folder, keeps_template=getattr(tokenizer, "chat_template", None) is None)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
