"""From the images of a document to the inputs of a vision-language model, through the model's own processor."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from lightning_fastft.core.errors import OptionError, UnsupportedModelError
from lightning_fastft.packing.document import Document
from lightning_fastft.packing.images import ImageInputs, decode_image
from lightning_fastft.packing.rows.rejects import IMAGE_COUNT, RowRejectedError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PretrainedConfig, ProcessorMixin

    from lightning_fastft.hf.loading.source import ModelSource

# Model types for which tests compare packed images with separate documents.
IMAGE_FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    *("llava", "mistral3", "internvl", "gemma3", "gemma4"),
)
# How images are decoded: their size and their pixels. A change has caches of images tokenised again.
_DECODING = "upright, scaled"
# Outputs of a processor that belong to the text.
_TEXT_OUTPUTS = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets", "labels"}
)


class ImageEncoder:
    """Expand image placeholders and convert images to model inputs with the model's transformers processor.

    Args:
        processor: The processor, or its source; a source is loaded on first use.

    Raises:
        OptionError: On first use: the processor has no placeholder for images, or cannot be read.
        MissingDependencyError: On first use: the extra ``vision`` is not installed.
    """

    def __init__(self, processor: ProcessorMixin | ModelSource) -> None:
        self._given = processor

    @functools.cached_property
    def processor(self) -> Any:
        """Return the transformers processor."""
        given: Any = self._given
        processor = given.load_processor() if hasattr(given, "load_processor") else given
        if getattr(processor, "image_token", None) is None:
            raise OptionError(
                f"{type(processor).__name__} has no placeholder for images (image_token). Train on text, or use a "
                "model family whose processor has one."
            )
        return processor

    @property
    def chat_template(self) -> str | None:
        """Return the processor's own chat template."""
        template = self.processor.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def fingerprint(self) -> str:
        """Return a digest of the settings that decide the tokens and the inputs of an image."""
        given: Any = self._given
        if hasattr(given, "processor_settings"):
            settings = given.processor_settings()
        else:
            settings = json.dumps([type(given).__name__, given.image_processor.to_json_string()])
        return hashlib.sha256((_DECODING + settings).encode()).hexdigest()

    def save(self, folder: Path, *, keeps_template: bool) -> None:
        """Write the files of the processor to the folder of a model.

        Those of a source are copied, without loading it, which would need the extra ``vision``. transformers saves a
        processor that was given.

        Args:
            folder: Where to write.
            keeps_template: Whether to write the processor's own chat template. Its older file, chat_template.json,
                would hide that of a tokenizer.
        """
        given: Any = self._given
        if hasattr(given, "copy_processor"):
            given.copy_processor(folder, with_template=keeps_template)
        else:
            given.save_pretrained(str(folder))

    def expand(self, text: str, images: Sequence[Image]) -> tuple[str, tuple[tuple[int, int, int, int], ...]]:
        """Return the text with each placeholder expanded to the tokens of its image, and the (begin, end) of each
        placeholder in the old text, then in the new one.

        Raises:
            RowRejectedError: The text has another number of placeholders, or the processor rejects an image.

        Cost:
            Processes the images, because their sizes decide the number of tokens.
        """
        num_places = text.count(self.processor.image_token)
        if num_places != len(images):
            raise RowRejectedError(
                IMAGE_COUNT, f"the chat template made {num_places} placeholders for {len(images)} images"
            )
        output = self._process(text, images, return_text_replacement_offsets=True)
        places = output["text_replacement_offsets"][0]
        parts, begin = [], 0
        for place in places:
            parts += [text[begin : place["span"][0]], place["replacement"]]
            begin = place["span"][1]
        return ("".join([*parts, text[begin:]]), tuple((*place["span"], *place["new_span"]) for place in places))

    def encode(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of the model for the images of one document."""
        output = self._process(self.processor.image_token * len(images), images)
        return {name: value for name, value in output.items() if name not in _TEXT_OUTPUTS}

    def _process(self, text: str, images: Sequence[Image], **options: Any) -> Mapping[str, Any]:
        try:
            return self.processor(
                images=list(images),
                text=[text],
                text_kwargs={"add_special_tokens": False},
                return_tensors="pt",
                **options,
            )
        except (ValueError, TypeError, IndexError) as error:
            raise RowRejectedError(IMAGE_COUNT, f"{type(self.processor).__name__}: {error}") from error


def document_images(encoder: ImageEncoder, *, config: PretrainedConfig) -> Callable[[Document], ImageInputs]:
    """Return a function that computes the image inputs of a document for the model, and the positions of its tokens.

    Raises:
        UnsupportedModelError: Images of this family are not supported.

    Cost:
        Each call decodes and processes the images of a document on the host.
    """
    check_images(config)
    # Copy the processor: a fast tokenizer must not be called from two threads at once.
    own = ImageEncoder(copy.deepcopy(encoder.processor))
    find_positions, directions = position_finder(config), image_directions(config)

    def encode(document: Document) -> ImageInputs:
        tensors = own.encode([decode_image(image) for image in document.images])
        if directions != "causal":
            spans = find_runs(document.input_ids == config.image_token_id)
            return ImageInputs(tensors, spans=spans, in_windows_only=directions == "both in windows")
        if find_positions is None:
            return ImageInputs(tensors)
        return ImageInputs(tensors, find_positions(torch.from_numpy(document.input_ids), tensors))

    return encode


def image_directions(config: PretrainedConfig) -> str:
    """Return how tokens of one image see each other: "causal", "both" (directions), or "both in windows" where only
    layers with a sliding window do so.
    """
    if config.model_type == "gemma3":
        return "both"
    text = config.get_text_config()
    is_both = config.model_type == "gemma4" and text.use_bidirectional_attention == "vision"
    return "both in windows" if is_both else "causal"


def find_runs(chosen_T: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the begin and end of each run of chosen tokens.

    Example:
        >>> find_runs(np.array([False, True, True, False, True]))
        ((1, 3), (4, 5))
    """
    edges = np.flatnonzero(np.diff(chosen_T.astype(np.int8), prepend=0, append=0)).tolist()
    return tuple(zip(edges[::2], edges[1::2]))


def check_images(config: PretrainedConfig) -> None:
    """Raise on a family whose packed images differ from separate documents, or were never compared.

    Raises:
        UnsupportedModelError: Images of the family cannot be packed; the message has the reason.
    """
    if config.model_type in IMAGE_FAMILIES:
        return
    raise UnsupportedModelError(
        f"Images of {config.model_type} are not packed: packed and alone have not been compared for its images. "
        f"Families with images: {', '.join(IMAGE_FAMILIES)}; this family supports text only."
    )


def find_config(module: nn.Module | None, *, name: object) -> PretrainedConfig:
    """Return the configuration of the model that gets the images.

    Without a module (no Trainer) it is read from the hub id or folder of the tokenizer.

    Raises:
        OptionError: No configuration is found.
        UnsupportedModelError: The module holds a model that is not a causal language model.
    """
    from lightning_fastft.hf.families import find_causal_models, find_other_models
    from lightning_fastft.hf.loading.source import ModelSource

    models = [] if module is None else find_causal_models(module)
    if models:
        return models[0][1].config
    source = getattr(module, "source", None)
    if isinstance(source, ModelSource):
        return source.config
    if isinstance(name, str):
        return ModelSource(name).config
    for other in [] if module is None else find_other_models(module):
        raise UnsupportedModelError(
            f"{type(other).__name__} is no causal language model, and these data are packed for one. Load it with "
            "AutoModelForCausalLM."
        )
    raise OptionError(
        "Positions of images need the configuration of the model, and there is no model yet. Train with a Trainer, or "
        "give the folder of the model as tokenizer."
    )


def position_finder(
    config: PretrainedConfig,
) -> Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor] | None:
    """Return a function from ids and image inputs of a document to positions on several axes (M-RoPE); None for a model
    whose images have text positions.

    The function is the model's own ``get_rope_index``, which reads only the configuration.
    """
    from transformers import MODEL_MAPPING

    model_class = MODEL_MAPPING.get(type(config), None)
    if not hasattr(model_class, "get_rope_index"):
        return None
    model = model_class.__new__(model_class)
    nn.Module.__init__(model)
    model.config = config
    parameters = inspect.signature(model_class.get_rope_index).parameters

    def find(input_id_T: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        options: dict[str, Any] = {name: value for name, value in tensors.items() if name in parameters}
        if "mm_token_type_ids" in parameters:
            options["mm_token_type_ids"] = (input_id_T == config.image_token_id).int()[None]
        position_A1T: torch.Tensor = model.get_rope_index(input_id_T[None], **options)[0]
        return position_A1T[:, 0]

    return find
