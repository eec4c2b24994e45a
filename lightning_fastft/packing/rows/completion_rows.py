"""Read rows of the formats with completions: a prompt, its completions, and one number per completion.

The formats are those of formats.TUNERS. Every completion is tokenised as a conversation of its own, behind the prompt;
the tokens that all of them begin with are kept once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lightning_fastft.packing.rows.messages import check_messages
from lightning_fastft.packing.rows.parsing import check_text
from lightning_fastft.packing.rows.rejects import (
    ALL_MASKED,
    ALL_MASKED_TRUNCATED,
    LENGTHS_DIFFER,
    MISSING_COLUMN,
    NO_ASSISTANT,
    NO_COMPLETION,
    NO_PROMPT,
    NOT_A_LOG_PROB,
    NOT_FINITE,
    PROMPT_TOO_LONG,
    SAME_COMPLETIONS,
    SAME_COMPLETIONS_TRUNCATED,
    WRONG_TYPE,
    RowRejectedError,
)
from lightning_fastft.packing.store.completion_store import Segments

_FLOAT32_MAX = float(np.finfo(np.float32).max)
_NUMBERS = (int, float, np.integer, np.floating)

Messages = list[dict[str, Any]]


class PromptRow(NamedTuple):
    """A prompt and its completions, all of them strings or all of them checked messages.

    is_implicit: the prompt is the common beginning of two strings.
    """

    prompt: Any
    completions: list[Any]
    scores: tuple[float, ...]
    is_implicit: bool = False


def read_completions(row: Mapping[str, Any], *, format: str) -> PromptRow:
    """Return the prompt, the completions and the scores of a row.

    Rollouts as ids have a function of their own.

    Raises:
        RowRejectedError: A value has a wrong type, or prompt and completions cannot be told apart.

    Example:
        >>> read_completions({"chosen": "Hi there", "rejected": "Hi you", "margin": 2}, format="preference")
        PromptRow(prompt='Hi', completions=[' there', ' you'], scores=(2.0, 0.0), is_implicit=True)
    """
    if format == "preference":
        return _read_preference(row)
    if format == "labelled":
        return _read_given(row["prompt"], {"completion": row["completion"]}, scores=(_read_label(row["label"]),))
    if format == "scored":
        return _read_given(
            row["prompt"], {"completion": row["completion"]}, scores=(_read_number(row["score"], column="score"),)
        )
    for column in ("prompt", "completions"):
        if column not in row:
            raise RowRejectedError(MISSING_COLUMN, repr(column))
    if "log_probs" in row:
        raise RowRejectedError(WRONG_TYPE, "log_probs belong to tokens: give prompt_ids and completion_ids too")
    completions = _read_list(row["completions"], column="completions")
    scores = _read_rewards(row, num_completions=len(completions))
    return _read_given(
        row["prompt"], {f"completions[{number}]": value for number, value in enumerate(completions)}, scores=scores
    )


def read_rollout_ids(row: Mapping[str, Any]) -> tuple[list[object], tuple[float, ...], list[np.ndarray] | None]:
    """Return completion_ids (unchecked), the rewards, and the log-probabilities of each completion, if there are any.

    Raises:
        RowRejectedError: A value has a wrong type, or lists differ in length.
    """
    completions = _read_list(row["completion_ids"], column="completion_ids")
    scores = _read_rewards(row, num_completions=len(completions))
    if "log_probs" not in row:
        return completions, scores, None
    values = _read_list(row["log_probs"], column="log_probs")
    if len(values) != len(completions):
        raise RowRejectedError(LENGTHS_DIFFER, f"{len(completions)} completions and {len(values)} lists of log_probs")
    log_probs = [_to_floats(value, column=f"log_probs[{number}]") for number, value in enumerate(values)]
    for number, log_prob_T in enumerate(log_probs):
        if log_prob_T.max(initial=0.0) > 0:
            raise RowRejectedError(NOT_A_LOG_PROB, f"{log_prob_T.max():g} in log_probs[{number}]")
    return completions, scores, log_probs


def join_ids(
    prompt: np.ndarray,
    completions: Sequence[np.ndarray],
    *,
    scores: tuple[float, ...],
    log_probs: Sequence[np.ndarray] | None,
) -> tuple[np.ndarray, np.ndarray, Segments]:
    """Return the ids, trained flags and completions of a row of ids; every token of a completion is trained.

    Raises:
        RowRejectedError: The prompt or a completion is empty, or log-probabilities differ from it in length.
    """
    if not len(prompt):
        raise RowRejectedError(NO_PROMPT, "prompt_ids is empty")
    for number, ids in enumerate(completions):
        if not len(ids):
            raise RowRejectedError(NO_COMPLETION, f"completion_ids[{number}]")
        if log_probs is not None and len(log_probs[number]) != len(ids):
            raise RowRejectedError(
                LENGTHS_DIFFER, f"completion_ids[{number}] has {len(ids)} ids and {len(log_probs[number])} log_probs"
            )
    input_ids = np.concatenate([prompt, *completions])
    is_trained = np.arange(len(input_ids)) >= len(prompt)
    log_prob_T = None
    if log_probs is not None:
        log_prob_T = np.concatenate([np.zeros(len(prompt)), *log_probs]).astype(np.float32)
    return input_ids, is_trained, Segments((len(prompt), *map(len, completions)), scores, log_prob_T)


def join_completions(
    ids: Sequence[np.ndarray], is_trained: Sequence[np.ndarray], *, scores: tuple[float, ...], must_differ: bool
) -> tuple[np.ndarray, np.ndarray, Segments]:
    """Return the ids, trained flags and completions of conversations that begin with the same prompt.

    The prompt is the longest beginning that all share and in which nothing is trained. So prompt and completion
    together are the tokens of the conversation alone, also if a template renders the prompt differently in some.

    Raises:
        RowRejectedError: Nothing is shared, or a conversation has no trained token.
    """
    for number, flags in enumerate(is_trained):
        if not flags.any():
            raise RowRejectedError(ALL_MASKED, f"completion {number + 1}")
    if must_differ and np.array_equal(ids[0], ids[1]):
        raise RowRejectedError(SAME_COMPLETIONS, "as tokens")
    num_prompt = min(int(np.argmax(flags)) for flags in is_trained)
    for other in ids[1:]:
        differs = np.flatnonzero(ids[0][:num_prompt] != other[:num_prompt])
        num_prompt = int(differs[0]) if differs.size else num_prompt
    if num_prompt == 0:
        raise RowRejectedError(NO_PROMPT, "the first tokens differ, or are trained")
    joined = np.concatenate([ids[0][:num_prompt], *(one[num_prompt:] for one in ids)])
    trained = np.concatenate([is_trained[0][:num_prompt], *(flags[num_prompt:] for flags in is_trained)])
    return joined, trained, Segments((num_prompt, *(len(one) - num_prompt for one in ids)), scores)


def cut_completions(
    input_ids: np.ndarray, is_trained: np.ndarray, completions: Segments, *, max_tokens: int, must_differ: bool
) -> tuple[np.ndarray, np.ndarray, Segments]:
    """Return an example that takes at most max_tokens in a pack: each completion gets an equal share of the room.

    Raises:
        RowRejectedError: The prompt leaves no room, a completion loses all of its trained tokens, or both lose what
            they differ in.
    """
    num_prompt, *lengths = completions.segment_lengths
    # A completion takes one token more than it has: a copy of the prompt's last token, whose own place is free.
    share = (max_tokens - num_prompt + 1) // len(lengths) - 1
    if share < 1:
        raise RowRejectedError(
            PROMPT_TOO_LONG, f"{num_prompt} tokens before {len(lengths)} completions, max_tokens={max_tokens}"
        )
    start_C = num_prompt + np.cumsum([0, *lengths[:-1]])
    kept_T = np.zeros(len(input_ids), dtype=bool)
    kept_T[:num_prompt] = True
    kept_C = [min(length, share) for length in lengths]
    for number, (start, length) in enumerate(zip(start_C.tolist(), kept_C)):
        kept_T[start : start + length] = True
        if not is_trained[start : start + length].any():
            raise RowRejectedError(ALL_MASKED_TRUNCATED, f"completion {number + 1}, cut to {share} tokens")
    if must_differ:
        chosen, rejected = (input_ids[start : start + length] for start, length in zip(start_C, kept_C))
        if np.array_equal(chosen, rejected):
            raise RowRejectedError(SAME_COMPLETIONS_TRUNCATED, f"cut to {share} tokens")
    log_probs = completions.log_probs
    return (
        input_ids[kept_T],
        is_trained[kept_T],
        Segments(
            (num_prompt, *kept_C),
            completions.scores,
            None if log_probs is None else log_probs[kept_T],
        ),
    )


def unlike(prompt: object, completion: object, *, column: str) -> RowRejectedError:
    """Return the rejection of a prompt and a completion that are not both strings or both lists of messages."""
    found = f"{type(prompt).__name__} and {type(completion).__name__}"
    return RowRejectedError(
        WRONG_TYPE, f"prompt and {column} must both be strings or both lists of messages, got {found}"
    )


def _read_preference(row: Mapping[str, Any]) -> PromptRow:
    chosen, rejected = row["chosen"], row["rejected"]
    margin = _read_number(row["margin"], column="margin") if "margin" in row else 0.0
    scores = (margin, 0.0)
    prompt = row.get("prompt")
    if isinstance(chosen, str) and isinstance(rejected, str) and prompt is None:
        return _split_texts(check_text(chosen, column="chosen"), check_text(rejected, column="rejected"), scores=scores)
    if prompt is not None and not (isinstance(prompt, str) and _is_list(chosen) and _is_list(rejected)):
        given = _read_given(prompt, {"chosen": chosen, "rejected": rejected}, scores=scores)
        if given.completions[0] == given.completions[1]:
            raise RowRejectedError(SAME_COMPLETIONS)
        return given
    turns = _split_turns(
        check_messages(_as_list(chosen), column="chosen"),
        check_messages(_as_list(rejected), column="rejected"),
        scores=scores,
    )
    # Data sets of whole conversations often repeat their question as a string.
    if prompt is not None and turns.prompt[-1].get("content") != prompt:
        raise RowRejectedError(
            WRONG_TYPE,
            "prompt is a string, chosen and rejected are lists of messages, and the last turn before they differ is "
            "not the prompt",
        )
    return turns


def _split_texts(chosen: str, rejected: str, *, scores: tuple[float, ...]) -> PromptRow:
    """Divide two texts after their common beginning, at white space."""
    if chosen == rejected:
        raise RowRejectedError(SAME_COMPLETIONS)
    common = chosen[: _count_common(chosen, rejected)]
    end = next((place for place in range(len(common), 0, -1) if common[place - 1].isspace()), 0)
    # Tokenizers join a space with the word behind it.
    end -= common[:end].endswith(" ")
    if not common[:end].strip():
        raise RowRejectedError(NO_PROMPT, "there is no prompt column, and chosen and rejected begin differently")
    for column, text in (("chosen", chosen), ("rejected", rejected)):
        if not text[end:].strip():
            raise RowRejectedError(NO_COMPLETION, f"{column} is the beginning of the other text")
    return PromptRow(common[:end], [chosen[end:], rejected[end:]], scores, is_implicit=True)


def _split_turns(chosen: Messages, rejected: Messages, *, scores: tuple[float, ...]) -> PromptRow:
    """Divide two conversations before the first message that differs."""
    if chosen == rejected:
        raise RowRejectedError(SAME_COMPLETIONS)
    num_common = _count_common(chosen, rejected)
    if num_common == 0:
        raise RowRejectedError(NO_PROMPT, "there is no prompt column, and the first messages differ")
    for column, turns in (("chosen", chosen), ("rejected", rejected)):
        if num_common == len(turns):
            raise RowRejectedError(NO_COMPLETION, f"{column} is the beginning of the other conversation")
        if not any(message["role"] == "assistant" for message in turns[num_common:]):
            raise RowRejectedError(NO_ASSISTANT, f"{column}[{num_common}] and later")
    return PromptRow(chosen[:num_common], [chosen[num_common:], rejected[num_common:]], scores)


def _count_common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many entries two sequences have in common at their beginning."""
    shorter = min(len(one), len(other))
    return next((number for number in range(shorter) if one[number] != other[number]), shorter)


def _read_given(prompt: object, completions: Mapping[str, object], *, scores: tuple[float, ...]) -> PromptRow:
    """Return a prompt and completions (by their columns), all strings or all messages."""
    if isinstance(prompt, str):
        texts = []
        for column, value in completions.items():
            if not isinstance(value, str):
                raise unlike(prompt, value, column=column)
            texts.append(check_text(value, column=column))
        return PromptRow(check_text(prompt, column="prompt"), texts, scores)
    if not _is_list(prompt):
        raise unlike(prompt, next(iter(completions.values())), column=next(iter(completions)))
    turns = []
    for column, value in completions.items():
        if not (_is_list(value) or isinstance(value, Mapping)):
            raise unlike(prompt, value, column=column)
        turns.append(check_messages(_as_list(value), column=column))
    return PromptRow(check_messages(prompt, column="prompt", needs_assistant=False), turns, scores)


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _as_list(value: object) -> object:
    """Return one message as a list; return any other value unchanged, for check_messages to judge."""
    return [value] if isinstance(value, Mapping) else value


def _read_list(value: object, *, column: str) -> list[object]:
    if not isinstance(value, (list, tuple)):
        raise RowRejectedError(WRONG_TYPE, f"{column} must be a list, got {type(value).__name__}")
    if not value:
        raise RowRejectedError(NO_COMPLETION, f"{column} is an empty list")
    return list(value)


def _read_rewards(row: Mapping[str, Any], *, num_completions: int) -> tuple[float, ...]:
    reward_C = _to_floats(row["rewards"], column="rewards")
    if len(reward_C) != num_completions:
        raise RowRejectedError(LENGTHS_DIFFER, f"{num_completions} completions and {len(reward_C)} rewards")
    return tuple(reward_C.tolist())


def _read_label(value: object) -> float:
    if not isinstance(value, (bool, int, np.bool_, np.integer)) or value not in (0, 1):
        raise RowRejectedError(WRONG_TYPE, f"label must be true, false, 0 or 1, got {value!r} ({type(value).__name__})")
    return float(value)


def _read_number(value: object, *, column: str) -> float:
    return float(_to_floats([value], column=column)[0])


def _to_floats(value: object, *, column: str) -> np.ndarray:
    """Return finite numbers as float64; they also fit float32."""
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "fiu":
        number_N = value.astype(np.float64)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            if not isinstance(entry, _NUMBERS) or isinstance(entry, bool):
                raise RowRejectedError(WRONG_TYPE, f"{column} must hold numbers, got {type(entry).__name__}")
        try:
            number_N = np.asarray(value, dtype=np.float64)
        except OverflowError:
            raise RowRejectedError(NOT_FINITE, f"{column} has an integer above the range of float32") from None
    else:
        raise RowRejectedError(WRONG_TYPE, f"{column} must be a list of numbers, got {type(value).__name__}")
    if not bool((np.abs(number_N) <= _FLOAT32_MAX).all()):
        raise RowRejectedError(NOT_FINITE, f"{column} has a number that is not finite as float32")
    return number_N
