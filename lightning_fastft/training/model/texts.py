"""TextCausalLM: a CausalLMModule that writes texts with the tokenizer and chat template of its training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_fastft.core.errors import OptionError
from lightning_fastft.training.model.causal_lm import CausalLMModule

if TYPE_CHECKING:
    from lightning_fastft.hf.images import ImageEncoder


class TextCausalLM(CausalLMModule):
    """Remember how the training data was read, for texts and files after the training.

    Args:
        args: Of ``CausalLMModule``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Those of the training data, if it had its own; a name is loaded on first use.
        self._trained_tokenizer: Any = None
        self._trained_images: ImageEncoder | None = None
        # That of the training data of a checkpoint, in place of the tokenizer's own.
        self._chat_template: str | None = None

    @property
    def trained_tokenizer(self) -> Any:
        """The tokenizer of the training data with its chat template; without such data ``tokenizer``."""
        from lightning_fastft.hf.loading.source import ModelSource
        from lightning_fastft.packing.tokens.chat import with_template

        if isinstance(self._trained_tokenizer, str):
            self._trained_tokenizer = ModelSource(self._trained_tokenizer).load_tokenizer()
        tokenizer = self.tokenizer if self._trained_tokenizer is None else self._trained_tokenizer
        return with_template(tokenizer, self._chat_template)

    @property
    def trained_images(self) -> ImageEncoder | None:
        """The processor of images of the training data; without such data ``image_encoder``."""
        return self.image_encoder if self._trained_images is None else self._trained_images

    def on_fit_start(self) -> None:
        """Note the tokenizer, chat template and processor of the training data."""
        super().on_fit_start()
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "trained_tokenizer"):
            self._trained_tokenizer, self._trained_images = data.trained_tokenizer, data.image_encoder
            self._chat_template = None

    def _read_tokenizer(self, checkpoint: Mapping[str, Any], *, run: Mapping[str, Any]) -> None:
        """Note the tokenizer and chat template of the run of a checkpoint."""
        options = checkpoint.get("datamodule_hyper_parameters") or {}
        self._trained_tokenizer = options.get("tokenizer")
        self._chat_template = run.get("data", {}).get("chat_template")

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
        *,
        max_new_tokens: int = 128,
        **options: Any,
    ) -> list[str]:
        """Generate a continuation of each prompt in evaluation mode, and restore the mode of every module.

        Args:
            prompts: Texts, or conversations (lists of messages with role and content) for the chat template, which is
                that of the training data.
            max_new_tokens: Most tokens to write.
            **options: Of transformers' ``generate``, for example ``do_sample=False``.

        Raises:
            OptionError: There is no model or no tokenizer.
        """
        from lightning_fastft.hf.generation import generate_texts

        tokenizer = self.trained_tokenizer
        if self.model is None or tokenizer is None:
            raise OptionError(
                "generate needs a model and a tokenizer; "
                f"{'the model is not built' if self.model is None else 'tokenizer is None'}."
            )
        options["max_new_tokens"] = max_new_tokens
        return generate_texts(self.model, tokenizer=tokenizer, prompts=prompts, **options)
