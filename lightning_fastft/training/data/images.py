"""The processor of images for a DataModule, and the inputs that it makes of a document's images."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_fastft.core.checks import is_processor
from lightning_fastft.core.errors import OptionError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_fastft.hf.images import ImageEncoder
    from lightning_fastft.packing.document import Document
    from lightning_fastft.packing.images import ImageInputs


def find_image_encoder(given: Any, *, module: LightningModule | None) -> ImageEncoder | None:
    """Return the processor of images; None if there is none.

    The option ``tokenizer`` is used, else the ``processor`` or ``image_encoder`` of the module.
    """
    from lightning_fastft.hf.images import ImageEncoder
    from lightning_fastft.hf.loading.source import ModelSource

    if isinstance(given, str):
        source = ModelSource(given)
        return ImageEncoder(source) if source.has_processor else None
    for processor in (given, getattr(module, "processor", None)):
        if is_processor(processor):
            return ImageEncoder(processor)
    return getattr(module, "image_encoder", None)


def make_document_images(given: Any, *, module: LightningModule | None) -> Callable[[Document], ImageInputs]:
    """Return the function from a document's images to inputs of the model.

    Raises:
        UnsupportedModelError: The model's family has images of a kind that is not supported.
        OptionError: There is no processor, or no model that gives the positions of images.
    """
    from lightning_fastft.hf.images import document_images, find_config

    encoder = find_image_encoder(given, module=module)
    if encoder is None:
        raise OptionError("The data has images, and no processor turns them into inputs. Give one as tokenizer.")
    return document_images(encoder, config=find_config(module, name=given))
