"""A tokenizer for counting where the model's own cannot be read: every few characters are a token."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% endfor %}"
)


def make_assumed_tokenizer(num_characters: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer that cuts a text after every few characters, with a ChatML template.

    Example:
        >>> len(make_assumed_tokenizer(4)("Hello there")["input_ids"])
        3
    """
    core = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1}, unk_token="<unk>"))  # noqa: S106 - no password
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"[\s\S]{{1,{num_characters}}}"), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",  # noqa: S106 - no password
        eos_token="<eos>",  # noqa: S106 - no password
        chat_template=_TEMPLATE,
    )
