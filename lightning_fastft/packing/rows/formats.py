"""Formats of examples: the columns of each format, the user's options, and detection by column names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fastft.core.checks import check_bool, check_choice, check_int, check_string
from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.rows.template_options import check_template_options

# Optional columns for the chat template: descriptions of tools, and options such as enable_thinking.
_CHAT = ("tools", "chat_template_kwargs")
# Required and optional columns of each format, in the order of detection. tokens/formatter.py reads them.
COLUMNS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "preference": (("chosen", "rejected"), ("prompt", "margin", *_CHAT, "images", "image")),
    "labelled": (("prompt", "completion", "label"), (*_CHAT, "images", "image")),
    "scored": (("prompt", "completion", "score"), (*_CHAT, "images", "image")),
    "stepwise": (("prompt", "completions", "labels"), ()),
    "rollouts": (
        ("rewards",),
        ("prompt", "completions", "prompt_ids", "completion_ids", "log_probs", *_CHAT, "images", "image"),
    ),
    "messages": (("messages",), (*_CHAT, "images", "image")),
    "conversations": (("conversations",), ("system", *_CHAT, "images", "image")),
    "prompt_completion": (("prompt", "completion"), (*_CHAT, "images", "image")),
    "instruction": (("instruction", "output"), ("input",)),
    "input_ids": (("input_ids",), ("labels", "completion_mask", "assistant_masks", "attention_mask")),
    "text": (("text",), ()),
}
COLUMN_NAMES = frozenset(name for required, optional in COLUMNS.values() for name in required + optional)
# Formats that also require at least one of these columns.
ALTERNATIVES: Mapping[str, tuple[str, ...]] = {"rollouts": ("completions", "completion_ids")}
# Optional columns that decide which tokens are trained: all rows of a source have them, or none.
DECISIVE: Mapping[str, tuple[str, ...]] = {"input_ids": ("labels", "completion_mask", "assistant_masks")}
# Formats whose examples are a prompt with completions, and the classes that train them. FineTuner trains all others.
TUNERS: Mapping[str, str] = {
    "preference": "PreferenceTuner(loss='sigmoid') or RewardTuner",
    "labelled": "PreferenceTuner(loss='kto')",
    "scored": "RewardTuner(loss='scalar')",
    "stepwise": "RewardTuner(loss='stepwise')",
    "rollouts": "PolicyTuner",
}
# Values of the options of these names.
TOO_LONG = ("refuse", "truncate", "split")
EXTRA_COLUMNS = ("refuse", "ignore")


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """Options for turning rows into tokens.

    Args:
        max_tokens: Longest example in tokens: the length of a pack.
        format: A format of COLUMNS, or "auto" to detect it from the columns of each file.
        columns: Column names of the format to those of the data, for example {"prompt": "question", "completion":
            "answer"}.
        loss_on: "completion" trains assistant turns, completions and outputs; "all" trains every token, and is
            refused for the formats of TUNERS.
        chat_template: Jinja text, or a .jinja file, in place of the tokenizer's own template.
        chat_template_kwargs: Variables of the chat template with JSON values, such as {"enable_thinking": False}. The
            column of that name of a row adds to them, and takes precedence.
        add_eos: Whether the end-of-sequence token is appended and trained, in every format but messages, conversations,
            stepwise and input_ids. In conversations: whether an answer that the chat template ends without a token is
            trained with the one at which generation stops.
        too_long: Action for an example of more than max_tokens: "refuse" stops before training, "truncate" keeps its
            beginning (and rejects it if no trained token is left), "split" makes several examples of it. In the formats
            of TUNERS, "truncate" keeps the prompt and gives all completions an equal share of the rest (of steps it
            keeps the first ones), and "split" is refused. Long examples are always counted.
        separator: Text between a prompt and a completion that are strings; none if the prompt was found as the common
            beginning of chosen and rejected.
        step_separator: Text behind each step of format "stepwise"; a step is scored at its last token.
        extra_columns: "refuse" rejects a row with a column that is not in the first 100 rows of its file, "ignore"
            accepts it.

    Raises:
        OptionError: An option is not allowed.
    """

    max_tokens: int
    format: str = "auto"
    columns: Mapping[str, str] | None = None
    loss_on: str = "completion"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_eos: bool = True
    too_long: str = "refuse"
    separator: str = ""
    step_separator: str = "\n"
    extra_columns: str = "refuse"

    def __post_init__(self) -> None:
        # Document offsets in a pack are 32-bit integers.
        check_int("max_tokens", self.max_tokens, low=2, high=2**31 - 1)
        check_bool("add_eos", self.add_eos)
        check_string("separator", self.separator, may_be_empty=True)
        check_string("step_separator", self.step_separator, may_be_empty=True)
        if self.chat_template is not None:
            check_string("chat_template", self.chat_template)
        check_template_options(self.chat_template_kwargs)
        if self.columns is not None and not isinstance(self.columns, Mapping):
            raise OptionError(
                "columns must be a mapping from column names of a format to those of the data, got "
                f"{self.columns!r} ({type(self.columns).__name__})."
            )
        check_choice("format", self.format, ("auto", *COLUMNS))
        check_choice("loss_on", self.loss_on, ("completion", "all"))
        check_choice("too_long", self.too_long, TOO_LONG)
        check_choice("extra_columns", self.extra_columns, EXTRA_COLUMNS)
        for name, theirs in (self.columns or {}).items():
            if name not in COLUMN_NAMES:
                raise OptionError(
                    f"columns maps {name!r}, which is not a column of any format. Allowed are "
                    f"{', '.join(sorted(COLUMN_NAMES))}."
                )
            check_string(f"columns[{name!r}]", theirs)


def detect_format(columns: Sequence[str] | frozenset[str], *, options: FormatOptions) -> str | None:
    """Return the first format whose required columns are all present; None if there is none.

    The columns have the user's names; a forced format is returned unchanged.

    Example:
        >>> options = FormatOptions(max_tokens=8, columns={"prompt": "question", "completion": "answer"})
        >>> detect_format(["question", "answer"], options=options)
        'prompt_completion'
    """
    if options.format != "auto":
        return options.format
    mapping = options.columns or {}
    for name, (required, _) in COLUMNS.items():
        alternatives = ALTERNATIVES.get(name)
        if all(mapping.get(column, column) in columns for column in required) and (
            alternatives is None or any(mapping.get(column, column) in columns for column in alternatives)
        ):
            return name
    return None


def describe_formats() -> str:
    """Return the required columns of each format, for error messages."""
    parts = []
    for name, (required, _) in COLUMNS.items():
        choice = " or ".join(ALTERNATIVES.get(name, ()))
        parts.append(f"{name}: {', '.join((*required, choice) if choice else required)}")
    return "; ".join(parts)


def find_wrong_mapping(columns: Sequence[str] | frozenset[str], *, options: FormatOptions) -> str:
    """Return an error text on mapped columns that the rows lack, with the closest match; "" if there is none.

    A mapping may serve sources of several formats. So a format is checked only if the rows have some of its mapped
    columns, or match no format. With ``extra_columns="ignore"`` optional columns may first appear in later rows.
    """
    mapping = options.columns or {}
    is_unknown = detect_format(columns, options=options) is None
    for required, optional in COLUMNS.values():
        names = required if options.extra_columns == "ignore" else required + optional
        mapped = [name for name in names if name in mapping]
        absent = [name for name in mapped if mapping[name] not in columns]
        if absent and (is_unknown or len(absent) < len(mapped)):
            near = difflib.get_close_matches(mapping[absent[0]], columns, n=1)
            meant = f". Did you mean {near[0]!r}?" if near else "."
            wrong = ", ".join(f"{name} to {mapping[name]!r}" for name in absent)
            present = ", ".join(sorted(columns))
            return f"columns maps {wrong}, which the rows do not have{meant} Their columns are {present}."
    return ""
