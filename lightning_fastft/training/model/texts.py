"""TextCausalLM: a CausalLMModule that writes texts with the tokenizer and chat template of its training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

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
        # That of the training data, if it had its own; a name is loaded on first use.
        self._trained_tokenizer: Any = None
        # The processor of images, where it comes neither with the model nor with the tokenizer.
        self.given_images: ImageEncoder | None = None
        # That of the training data of a checkpoint, in place of the tokenizer's own.
        self._chat_template: str | None = None
        # The variables of the chat template of the training data.
        self.chat_template_kwargs: dict[str, Any] = {}
        # The control token that ends its answers, if generation does not stop there.
        self.answer_end: int | None = None

    @property
    def trained_tokenizer(self) -> Any:
        """The tokenizer of the training data with its chat template; without such data ``tokenizer``."""
        from lightning_fastft.hf.loading.source import load_given_tokenizer
        from lightning_fastft.packing.tokens.chat import with_template

        if isinstance(self._trained_tokenizer, str):
            self._trained_tokenizer = load_given_tokenizer(self._trained_tokenizer)
        tokenizer = self.tokenizer if self._trained_tokenizer is None else self._trained_tokenizer
        return with_template(tokenizer, self._chat_template)

    @property
    def image_encoder(self) -> ImageEncoder | None:
        """The processor of images, loaded on first use: of the model, else of its training data; else None."""
        found = super().image_encoder
        return self.given_images if found is None else found

    def on_fit_start(self) -> None:
        """Note the tokenizer, chat template and processor of the training data."""
        super().on_fit_start()
        data: Any = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "trained_tokenizer"):
            self._trained_tokenizer, self.given_images = data.trained_tokenizer, data.image_encoder
            self._chat_template = None
        if hasattr(data, "chat_template_kwargs"):
            self.chat_template_kwargs = data.chat_template_kwargs
        if hasattr(data, "answer_end"):
            self.answer_end = data.answer_end
        if self.answer_end is not None:
            token = self.trained_tokenizer.convert_ids_to_tokens(self.answer_end)
            rank_zero_info(
                f"Answers of the data end with {token!r}, at which the generation configuration of the model does not "
                "stop. Generation and saved models will stop there too."
            )

    def _read_tokenizer(self, checkpoint: Mapping[str, Any], *, run: Mapping[str, Any]) -> None:
        """Note the tokenizer and chat template of the run of a checkpoint."""
        options = checkpoint.get("datamodule_hyper_parameters") or {}
        self._trained_tokenizer = options.get("tokenizer")
        self._chat_template = run.get("data", {}).get("chat_template")
        self.chat_template_kwargs = run.get("data", {}).get("chat_template_kwargs", {})
        self.answer_end = run.get("answer_end")

    def use_average(self) -> None:
        """Give the weights the values that are evaluated and saved; a subclass may train at others."""

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
        *,
        max_new_tokens: int = 128,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[str]:
        """Generate a continuation of each prompt in evaluation mode, and restore the mode of every module.

        Args:
            prompts: Texts, or conversations (lists of messages with role and content) for the chat template, which is
                that of the training data.
            max_new_tokens: Most tokens to write.
            chat_template_kwargs: Variables of the chat template, in addition to those of the training data, and in
                place of those with the same name; for example {"enable_thinking": True}.
            **options: Of transformers' ``generate``, for example ``do_sample=False``.

        Raises:
            OptionError: There is no model or no tokenizer, or the chat template does not read a variable.
        """
        from lightning_fastft.hf.generation import add_stop, generate_texts
        from lightning_fastft.moe.expert_axis import on_equal_tokens
        from lightning_fastft.packing.rows.template_options import check_template_reads
        from lightning_fastft.packing.tokens.chat import read_template

        tokenizer = self.trained_tokenizer
        if self.model is None or tokenizer is None:
            raise OptionError(
                "generate needs a model and a tokenizer; "
                f"{'the model is not built' if self.model is None else 'tokenizer is None'}."
            )
        given = check_template_reads(chat_template_kwargs, template=read_template(tokenizer, None))
        options["max_new_tokens"] = max_new_tokens
        options["chat_template_kwargs"] = {**self.chat_template_kwargs, **given}
        if self.answer_end is not None:
            options.setdefault("eos_token_id", add_stop(self.model.generation_config, self.answer_end).eos_token_id)
        self.use_average()
        with on_equal_tokens(self.model):
            return generate_texts(self.model, tokenizer=tokenizer, prompts=prompts, **options)
