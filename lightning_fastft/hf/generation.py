"""Text from a model: prompts or conversations, padded on the left, in evaluation mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_fastft.core.errors import OptionError


@torch.no_grad()
def generate_texts(
    model: Any,
    *,
    tokenizer: Any,
    prompts: Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
    max_new_tokens: int,
    **options: Any,
) -> list[str]:
    """Return what the model writes after each prompt; the mode of every module is restored, the tokenizer is left as it
    is.

    Args:
        model: A model with ``generate``, on any device.
        tokenizer: Its tokenizer; a missing padding token is replaced by the end-of-text token, which the attention mask
            hides.
        prompts: Texts, or conversations (lists of messages with role and content) for the chat template.
        max_new_tokens: Most tokens to write.
        **options: Of transformers' ``generate``.

    Raises:
        OptionError: prompts is one string, or a prompt has no token.
    """
    if isinstance(prompts, str):
        raise OptionError("prompts must be a list, got one string: write [prompt].")
    rows = [_encode(tokenizer, prompt) for prompt in prompts]
    empty = [number for number, row in enumerate(rows) if not row]
    if empty:
        raise OptionError(f"Prompt {empty[0]} has no token.")
    if not rows:
        return []
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    width = max(len(row) for row in rows)
    device = model.get_input_embeddings().weight.device
    input_ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    options.setdefault("pad_token_id", pad)
    if model.generation_config.eos_token_id is None and tokenizer.eos_token_id is not None:
        options.setdefault("eos_token_id", tokenizer.eos_token_id)

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        written = model.generate(
            input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **options
        )
    finally:
        for module, mode in modes:
            module.training = mode
    return tokenizer.batch_decode(written[:, width:], skip_special_tokens=True)


def _encode(tokenizer: Any, prompt: str | Sequence[Mapping[str, str]]) -> list[int]:
    """Return the token ids of a text or a conversation."""
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
