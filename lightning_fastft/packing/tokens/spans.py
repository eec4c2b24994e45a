"""Trained spans: from characters of a text to its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fastft.packing.tokens.control_tokens import Rendered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_TWICE = "rows whose completion begins with its prompt, which the model reads twice"
IN_PARTS = "examples tokenised in parts, because a token crossed from context into trained text"
# A shorter prompt may begin an answer by chance.
_FEWEST_CHARACTERS = 16


def move_spans(
    spans: Sequence[tuple[int, int]], places: Sequence[tuple[int, int, int, int]]
) -> tuple[tuple[int, int], ...]:
    """Return character spans in a text whose placeholders were expanded; the expanded ones are in no span.

    Args:
        spans: Spans in the old text, ascending.
        places: For each placeholder its (begin, end) in the old text, then in the new one.

    Example:
        >>> move_spans([(0, 6)], [(2, 3, 2, 5)])
        ((0, 2), (5, 8))
    """
    moved = []
    for begin, end in spans:
        shift = 0
        for old_begin, old_end, new_begin, new_end in places:
            if old_end <= begin:
                shift = new_end - old_end
            elif old_begin < end:
                if begin < old_begin:
                    moved.append((begin + shift, new_begin))
                begin, shift = old_end, new_end - old_end
        if begin < end:
            moved.append((begin + shift, end + shift))
    return tuple(moved)


def find_repeated_prompt(prompt: str, completion: str) -> tuple[str, ...]:
    """Return a note on a completion that begins with its prompt, if it does.

    Example:
        >>> find_repeated_prompt("What is two and two? ", "What is two and two? Four.") == (PROMPT_TWICE,)
        True
    """
    begin = prompt.strip()
    return (PROMPT_TWICE,) if len(begin) >= _FEWEST_CHARACTERS and completion.lstrip().startswith(begin) else ()


def find_repeated_turns(messages: Sequence[Mapping[str, Any]], *, num_context_turns: int) -> tuple[str, ...]:
    """Return a note on a conversation whose completion begins with the turns of its prompt, if it does.

    A prompt that ends with an answer may be continued with the same answer.
    """
    prompt, answer = messages[:num_context_turns], messages[num_context_turns:]
    is_twice = bool(prompt) and prompt[-1]["role"] != "assistant" and answer[:num_context_turns] == prompt
    return (PROMPT_TWICE,) if is_twice else ()


def place_spans(
    tokenizer: PreTrainedTokenizerBase, batch: Any, number: int, example: Rendered, *, notes: Counter[str]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ids and trained token spans; if a token crosses a span border, tokenise both sides separately.

    At inference the prompt is tokenised alone, so a token across the border would never occur.
    """
    ids = list(batch["input_ids"][number])
    borders = sorted({border for span in example.spans for border in span})
    found = {
        border: _find_border_fast(batch, number, example.text, border, num_ids=len(ids))
        if tokenizer.is_fast
        else _find_border_slow(tokenizer, example.text, border, ids)
        for border in borders
    }
    spans = [(found[begin][0], found[end][0]) for begin, end in example.spans]
    is_clean = all(is_clean for _, is_clean in found.values())
    splits = (_splits_white_space(batch, number, example.text, border) for border in borders if tokenizer.is_fast)
    if is_clean and not any(splits):
        return ids, spans
    cuts = [0, *(border for border in borders if 0 < border < len(example.text)), len(example.text)]
    pieces = tokenizer(
        [example.text[begin:end] for begin, end in pairwise(cuts)],
        add_special_tokens=False,
        return_attention_mask=False,
        verbose=False,
    )["input_ids"]
    joined = [token for piece in pieces for token in piece]
    if _decode(tokenizer, joined) == _decode(tokenizer, ids):
        if joined != ids or not is_clean:
            notes[IN_PARTS] += 1
        place = dict(zip(cuts, np.cumsum([0, *map(len, pieces)]).tolist()))
        return joined, [(place[begin], place[end]) for begin, end in example.spans]
    # This tokenizer adds a prefix to each text, so parts do not add up to the whole. Keep the crossing token as
    # context.
    if not is_clean:
        notes["examples with a token across the border of trained text, which is not trained"] += 1
    return ids, spans


def _find_border_fast(batch: Any, number: int, text: str, border: int, *, num_ids: int) -> tuple[int, bool]:
    """Return the first token that begins at or after a border, and whether no token crosses the border."""
    if border == 0:
        return 0, True
    if border >= len(text):
        return num_ids, True
    for character in range(border, len(text)):
        token = batch.char_to_token(number, character)
        if token is not None:
            break
    else:
        token = num_ids
    if token < num_ids and batch.token_to_chars(number, token).start < border:
        return token + 1, False
    # White space that a tokenizer omits from its offsets appears as a gap before the border.
    return token, token == 0 or batch.token_to_chars(number, token - 1).end == border


def _splits_white_space(batch: Any, number: int, text: str, border: int) -> bool:
    """Return whether white space before a border is several tokens, which it may not be at the end of a text.

    Tokenizers like that of GPT-2 keep the last character of a run of white space for the word behind it.
    """
    if not text[max(border - 2, 0) : border].isspace() or border < 2 or border >= len(text):
        return False
    token = batch.char_to_token(number, border - 1)
    begin = border - 1 if token is None else batch.token_to_chars(number, token).start
    return bool(begin > 0 and text[begin - 1].isspace())


def _find_border_slow(tokenizer: PreTrainedTokenizerBase, text: str, border: int, ids: list[int]) -> tuple[int, bool]:
    """Find the border by tokenising the text before it; no token crosses it if those ids are a prefix of all."""
    if border >= len(text):
        return len(ids), True
    before = tokenizer(text[:border], add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return len(before), ids[: len(before)] == list(before)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
