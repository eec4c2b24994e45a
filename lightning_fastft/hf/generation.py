"""Generate text from prompts or conversations, padded on the left, in evaluation mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.dtypes import seeded
from lightning_fastft.packing.tokens.token_ids import find_prefix

if TYPE_CHECKING:
    from transformers import GenerationConfig


@torch.no_grad()
def generate_texts(
    model: Any,
    *,
    tokenizer: Any,
    prompts: Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
    max_new_tokens: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Return the generated text of each prompt; the mode of every module is restored, and the tokenizer is not changed.

    Args:
        model: A model with ``generate``, on any device.
        tokenizer: Tokenizer of the model. Without a padding token it pads with the end-of-text token, which the
            attention mask hides.
        prompts: Texts, or conversations (lists of messages with role and content) for the chat template.
        max_new_tokens: Largest number of tokens to generate.
        chat_template_kwargs: Variables of the chat template for the conversations.
        **options: Options of transformers' ``generate``.

    Raises:
        OptionError: prompts is a string, or a prompt has no token.
    """
    if isinstance(prompts, str):
        raise OptionError("prompts must be a list, got a string; write [prompt].")
    rows = [encode_prompt(tokenizer, prompt, chat_template_kwargs) for prompt in prompts]
    return _write_texts(model, tokenizer, rows, max_new_tokens=max_new_tokens, **options)


@torch.no_grad()
def answer_prompts(model: Any, *, tokenizer: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[str]:
    """Return the greedy answer to each prompt of token ids; the mode of every module is restored.

    Raises:
        OptionError: A prompt has no token.
    """
    return _write_texts(model, tokenizer, prompts, max_new_tokens=max_new_tokens, do_sample=False)


def list_stops(eos_token_id: int | list[int] | None) -> list[int]:
    """Return the ids of ``eos_token_id`` of a generation configuration or a tokenizer, in their order.

    Example:
        >>> list_stops(None), list_stops(2), list_stops([2, 5])
        ([], [2], [2, 5])
    """
    return [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())


def add_stop(generation: GenerationConfig, token: int) -> GenerationConfig:
    """Return a copy of a generation configuration that also stops at a token."""
    extended = copy.deepcopy(generation)
    known = list_stops(generation.eos_token_id)
    extended.eos_token_id = known if token in known else [*known, token]
    # It has a value of its own now, and must not be made again from the configuration of the model.
    extended._from_model_config = False
    if getattr(generation, "_original_object_hash", None) == hash(generation):
        # transformers saves a configuration as it was read, even with a temperature beside do_sample=False, but refuses
        # that of one which was changed since.
        extended._original_object_hash = hash(extended)
    return extended


def read_stops(folder: Path) -> list[int]:
    """Return the ids at which the generation configuration of a folder stops; none without such a file."""
    from transformers import GenerationConfig
    from transformers.utils import GENERATION_CONFIG_NAME

    if not (folder / GENERATION_CONFIG_NAME).is_file():
        return []
    return list_stops(GenerationConfig.from_pretrained(str(folder)).eos_token_id)


def stream_to(write: Callable[[str], None], *, tokenizer: Any) -> Any:
    """Return a ``streamer`` for ``generate`` that calls a function with each piece of the text of one prompt."""
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _write_texts(
    model: Any, tokenizer: Any, rows: Sequence[Sequence[int]], *, max_new_tokens: int, **options: Any
) -> list[str]:
    """Return the text that continues each row of token ids."""
    empty = [number for number, row in enumerate(rows) if not row]
    if empty:
        raise OptionError(f"Prompt {empty[0]} has no token.")
    if not rows:
        return []
    pad, ends = _special_ids(model, tokenizer)
    options.setdefault("pad_token_id", pad)
    if model.generation_config.eos_token_id is None and ends:
        options.setdefault("eos_token_id", ends)
    written = _generate(model, rows, pad=pad, max_new_tokens=max_new_tokens, **options)
    return tokenizer.batch_decode(written, skip_special_tokens=True)


@torch.no_grad()
def sample_completions(
    model: Any,
    *,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    num_completions: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    more_ends: Sequence[int] = (),
    **options: Any,
) -> list[list[list[int]]]:
    """Return sampled completions of each prompt as token ids, with the end-of-text token if it was generated.

    Generation also stops at the tokens of more_ends.

    The mode of every module is restored, and the global generators do not change. The distribution is the model's own
    at the temperature, above 0: of its ``generation_config`` only the end-of-text tokens are read, no penalty, filter
    or banned token. The options are those of transformers' ``generate``. A ``repetition_penalty`` counts the tokens of
    the prompt, as in transformers, but not its padding.

    Cost:
        One batch of len(prompts) x num_completions rows, padded on the left; one host sync per token.
    """
    pad, ends = _special_ids(model, tokenizer)
    ends = [*ends, *more_ends]
    device = model.get_input_embeddings().weight.device
    penalty = options.pop("repetition_penalty", 1.0)
    if penalty != 1.0:
        widths = [len(prompt) for prompt in prompts for _ in range(num_completions)]
        options["logits_processor"] = [_penalise_repetition(penalty, widths)]
    with seeded(seed, device=device), _neutral_generation(model):
        written = _generate(
            model, prompts, pad=pad, max_new_tokens=max_new_tokens, do_sample=True, temperature=temperature,
            num_return_sequences=num_completions, eos_token_id=ends or None, pad_token_id=pad,
            **{"top_k": 0, "top_p": 1.0, **options},
        ).tolist()  # fmt: skip
    rows = [_cut(row, ends) for row in written]
    return [rows[begin : begin + num_completions] for begin in range(0, len(rows), num_completions)]


def _penalise_repetition(penalty: float, widths: Sequence[int]) -> Any:
    """Return transformers' repetition penalty without the padding on the left of prompts of these widths.

    Padding would penalise its token, often that of the end of text, in all rows but the longest.
    """
    from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

    penalise = RepetitionPenaltyLogitsProcessor(penalty)
    num_padded = max(widths) - torch.tensor(widths)[:, None]

    class Penalty(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            begin = num_padded.to(input_ids.device)
            # A token counts once: the first of the prompt takes the place of the padding.
            is_padding = torch.arange(input_ids.shape[1], device=input_ids.device) < begin
            return penalise(torch.where(is_padding, input_ids.gather(1, begin), input_ids), scores)

    return Penalty()


@contextmanager
def _neutral_generation(model: Any) -> Iterator[None]:
    """Hide the generation config of a model, which ``generate`` merges into every other config that it is given."""
    from transformers import GenerationConfig

    base = model.get_base_model() if hasattr(model, "peft_config") else model
    own = base.generation_config
    # A cache changes no distribution, and some models have none.
    base.generation_config = GenerationConfig(use_cache=own.use_cache)
    try:
        yield
    finally:
        base.generation_config = own


def _cut(row: list[int], ends: Sequence[int]) -> list[int]:
    """Return a row up to its first end-of-text token."""
    place = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
    return row[: place + 1]


def _special_ids(model: Any, tokenizer: Any) -> tuple[int, list[int]]:
    """Return the padding token and the end-of-text tokens."""
    pad = next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)
    ends = model.generation_config.eos_token_id
    return pad, list_stops(tokenizer.eos_token_id if ends is None else ends)


def _generate(
    model: Any, rows: Sequence[Sequence[int]], *, pad: int, max_new_tokens: int, **options: Any
) -> torch.Tensor:
    """Return the generated tokens after rows padded on the left, in evaluation mode; modes are restored."""
    width = max(len(row) for row in rows)
    device = model.get_input_embeddings().weight.device
    input_ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows], device=device)
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        written: torch.Tensor = model.generate(
            input_ids=input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **options
        )
    finally:
        for module, mode in modes:
            module.training = mode
    return written[:, width:]


def encode_prompt(
    tokenizer: Any, prompt: str | Sequence[Mapping[str, str]], variables: Mapping[str, Any] | None = None
) -> list[int]:
    """Return the token ids of a text, or of a conversation with the variables of the chat template.

    A text begins with the tokens that the tokenizer adds before it, as in training. Those that it adds behind it, such
    as the end-of-sequence token of ``add_eos_token``, would end the answer before it begins.
    """
    if isinstance(prompt, str):
        prefix, ids = find_prefix(tokenizer), list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        return ids if ids[: len(prefix)] == prefix else prefix + ids
    text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True, **(variables or {}))
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
