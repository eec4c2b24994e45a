"""Tools that completions call: described in the prompt, called after a turn, and answered in the next."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.tool_calls import describe_tool, known_syntaxes, read_turn
from lightning_fastft.packing.rows.messages import check_tools
from lightning_fastft.packing.rows.rejects import RowRejectedError
from lightning_fastft.packing.rows.template_options import OPTIONS
from lightning_fastft.packing.tokens.formatter import Formatter
from lightning_fastft.training.data.rollouts import TOOLS


def _probe(text: str) -> None:
    """Look a text up.

    Args:
        text: What to look up.
    """


def check_tool_functions(tools: object) -> dict[str, Callable[..., Any]]:
    """Return tools by their names; empty without any.

    Raises:
        OptionError: One is not a function with a docstring and types from which a model learns its use, or is a
            coroutine function; or two have one name.
    """
    given = [] if tools is None else list(tools) if isinstance(tools, (list, tuple)) else [tools]
    named: dict[str, Callable[..., Any]] = {}
    for tool in given:
        name = getattr(tool, "__name__", None)
        if not callable(tool) or name is None:
            raise OptionError(f"tools must be a function or a list of functions, got {tool!r} ({type(tool).__name__}).")
        if inspect.iscoroutinefunction(tool):
            raise OptionError(f"The tool {name} is a coroutine function; give one that returns its result.")
        if name in named:
            raise OptionError(f"Two tools have the name {name}, by which a model calls them: rename one.")
        describe_tool(tool)
        named[name] = tool
    return named


class Tools:
    """Functions that a model calls while it completes a prompt.

    How the model writes calls is taken from the tokenizer's ``response_template``, or found among known syntaxes: that
    which reads a call of the chat template back.

    Args:
        functions: Tools by their names, checked.
        formatter: Renders prompts and results with the chat template.
        tokenizer: That of the formatter.
        end_ids: Tokens that end a turn.

    Raises:
        OptionError: The calls of the chat template cannot be read, or do not end with one of these tokens.

    Source:
        transformers, PreTrainedTokenizerBase.parse_response and get_json_schema.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        *,
        formatter: Formatter,
        tokenizer: Any,
        end_ids: Sequence[int],
    ) -> None:
        self._functions = dict(functions)
        self.schemas = [describe_tool(function) for function in functions.values()]
        self._formatter, self._tokenizer, self._end_ids = formatter, tokenizer, frozenset(end_ids)
        self._failures: set[tuple[str, type]] = set()
        self._syntax = self._find_syntax()

    def describe(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row whose column "tools" describes these tools, if it has no descriptions of its own."""
        return {**row, TOOLS: self.schemas} if not row.get(TOOLS) else dict(row)

    def ends_turn(self, ids: Sequence[int]) -> bool:
        """Return whether a turn is finished, not cut off."""
        return bool(ids) and ids[-1] in self._end_ids

    def read(self, ids: Sequence[int], *, prompt: Sequence[int], row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a turn as a message, with its reasoning and tool_calls apart; as text alone if it cannot be read."""
        found = read_turn(
            self._tokenizer, ids, prompt=prompt, syntax=self._syntax, tools=check_tools(self.describe(row)[TOOLS])
        )
        if found is None:
            found = {"content": self._tokenizer.decode(list(ids), skip_special_tokens=True)}
        return {"role": "assistant", "content": "", **{name: value for name, value in found.items() if value}}

    def answer(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Call the tools of a turn, one after the other, and return a message for each result."""
        results = []
        for number, call in enumerate(message["tool_calls"]):
            name = call["function"]["name"]
            content = self._call(name, call["function"]["arguments"])
            # JSON of the model may hold half a surrogate pair, which no tokenizer takes.
            name, content = (text.encode(errors="replace").decode() for text in (name, content))
            results.append({"role": "tool", "name": name, "tool_call_id": _call_id(number), "content": content})
        return results

    def encode(self, results: Sequence[Mapping[str, Any]], *, row: Mapping[str, Any]) -> list[int]:
        """Return the tokens between the end of a turn and the begin of the next, with the results of its calls.

        Raises:
            RowRejectedError: The chat template cannot render them.
        """
        whole, end = self._render(results[0]["name"], {}, results, row=self.describe(row))
        return whole[end:]

    def _render(
        self, name: str, arguments: dict[str, Any], results: Sequence[Mapping[str, Any]], *, row: Mapping[str, Any]
    ) -> tuple[list[int], int]:
        """Return the tokens of a question, a call and its results, and where the call ends."""
        question = {"role": "user", "content": "?"}
        function = {"name": name, "arguments": arguments}
        # Some templates refuse a turn with several calls.
        call = {"type": "function", "id": _call_id(0), "function": function}
        options = {"tools": row[TOOLS], "template_options": row.get(OPTIONS)}
        before = self._formatter.encode_prompt([question], **options)
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        whole = self._formatter.encode_prompt([question, turn, *map(dict, results)], **options)
        ends = [place + 1 for place, token in enumerate(whole) if token in self._end_ids]
        num_before = sum(token in self._end_ids for token in before)
        if len(ends) <= num_before:
            raise OptionError(
                "The chat template does not end a turn that calls a tool with a token at which generation stops, so "
                "calls cannot be answered. Give a template that does, or a sampler of your own that calls tools."
            )
        return whole, ends[num_before]

    def _find_syntax(self) -> dict[str, Any]:
        """Return the response template that reads a call as the chat template writes it.

        Raises:
            OptionError: None does.
        """
        schemas = [describe_tool(_probe)]
        arguments = {"text": "a b"}
        result = {"role": "tool", "name": "_probe", "tool_call_id": _call_id(0), "content": "c"}
        try:
            whole, end = self._render("_probe", arguments, [result], row={TOOLS: schemas})
            prompt = self._formatter.encode_prompt([{"role": "user", "content": "?"}], tools=schemas)
        except RowRejectedError as error:
            raise OptionError(f"The chat template cannot render a call of a tool and its result: {error}") from error
        # A template may begin reasoning in the prompt that it leaves out of earlier turns.
        begin = next((place for place, pair in enumerate(zip(prompt, whole)) if pair[0] != pair[1]), len(prompt))
        own = getattr(self._tokenizer, "response_template", None)
        known = known_syntaxes([self._tokenizer.decode([token]) for token in sorted(self._end_ids)])
        for syntax in known if own is None else [own]:
            found = read_turn(self._tokenizer, whole[begin:end], prompt=whole[:begin], syntax=syntax, tools=schemas)
            calls = [call["function"] for call in (found or {}).get("tool_calls") or []]
            if calls == [{"name": "_probe", "arguments": arguments}]:
                return syntax
        raise OptionError(
            "Tools need calls that can be read, and "
            + ("no known syntax reads" if own is None else "the tokenizer's response_template does not read")
            + f" the call {self._tokenizer.decode(whole[begin:end])!r} of the chat template. Set "
            "tokenizer.response_template as in transformers' parse_response, or give a sampler of your own that calls "
            "tools."
        )

    def _call(self, name: str, arguments: Any) -> str:
        function = self._functions.get(name)
        if function is None:
            return _error(f"Tool {name} not found.")
        if not isinstance(arguments, Mapping):
            return _error(f"{name}() takes an object with its arguments")
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            return _error(f"{name}() {error}")
        try:
            result = function(**arguments)
        # Whatever a tool raises is a result for the model.
        except Exception as error:  # noqa: BLE001
            if (name, type(error)) not in self._failures:
                self._failures.add((name, type(error)))
                warnings.warn(
                    f"The tool {name} raised {type(error).__name__}: {error}. The model reads this as the result of "
                    "its call, and the run goes on.",
                    stacklevel=2,
                )
            return _error(str(error))
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _call_id(number: int) -> str:
    # Mistral's templates ask for nine letters and digits.
    return f"call{number:05d}"


def _error(text: str) -> str:
    return json.dumps({"error": text}, ensure_ascii=False)
