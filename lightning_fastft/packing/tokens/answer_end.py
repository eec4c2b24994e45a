"""Find the token that ends trained answers and texts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.tokens.chat import read_template
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.packing.tokens.token_ids import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONVERSATION = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Two."}]


def find_answer_end(
    tokenizer: PreTrainedTokenizerBase | None, *, options: FormatOptions, stop_ids: Collection[int]
) -> int | None:
    """Return the control token that ends trained answers, if generation does not stop there; else None.

    Base models generate until the end-of-text token, and their chat templates, or those that were given to the data,
    end an answer with another one: a trained model writes it and goes on.

    Args:
        tokenizer: Its chat template is used. None, and a tokenizer without one, have no such token.
        options: How conversations are read, with another chat template or without.
        stop_ids: Ids at which generation stops; the end-of-sequence token of the tokenizer if there are none.
    """
    if tokenizer is None or read_template(tokenizer, None) is None:
        return None
    options = replace(options, loss_on="completion", chat_template=None)
    formatter = Formatter(tokenizer, options=options, stop_ids=tuple(stop_ids))
    (found,) = formatter.encode([{"messages": _CONVERSATION}], format="messages")
    if not isinstance(found, Encoded) or not found.is_trained.any():
        return None
    last = int(found.input_ids[found.is_trained][-1])
    is_control = last in tokenizer.added_tokens_decoder
    return last if is_control and last not in (stop_ids or {tokenizer.eos_token_id}) else None


def find_text_end(
    tokenizer: PreTrainedTokenizerBase | None, *, options: FormatOptions, stop_ids: Collection[int]
) -> int | None:
    """Return the end-of-sequence token that is trained behind plain text, if generation does not stop there; else None.

    Args:
        tokenizer: None, and a tokenizer without that token, have none.
        options: How texts are read.
        stop_ids: Ids at which generation stops; the end-of-sequence token of the tokenizer if there are none.
    """
    end = None if tokenizer is None or not options.add_eos else tokenizer.eos_token_id
    return end if stop_ids and end not in stop_ids else None
