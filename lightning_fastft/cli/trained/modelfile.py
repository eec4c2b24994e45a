"""Write a Modelfile for Ollama: the chat template of a tokenizer in Go's template language, and parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.hf.generation import list_stops

_ROLES = ("system", "user", "assistant")
# Contents that no template has.
_CONTENT = {role: f"\u2402{role}\u2403" for role in _ROLES}
# Names of generation_config.json that are parameters of Ollama, by their names there.
_PARAMETERS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repeat_penalty",
}
Message = Mapping[str, str]


class Turns(NamedTuple):
    """A chat template as text around the content of each message.

    Args:
        around: (before, after) by role; no "system" where the template has none.
        without_system: Text in place of a system message where there is none.
        prompt: Text before an answer that is to be generated.
    """

    around: dict[str, tuple[str, str]]
    without_system: str
    prompt: str

    def render(self, messages: Sequence[Message]) -> str:
        """Return a conversation as the text that a model answers."""
        begin = "" if messages[0]["role"] == "system" else self.without_system
        turns = (
            f"{before}{message['content']}{after}"
            for message in messages
            for before, after in [self.around[message["role"]]]
        )
        return f"{begin}{''.join(turns)}{self.prompt}"

    def go(self) -> str:
        """Return the template in Go's template language."""
        begin = "" if not self.without_system else f"{{{{ if not .System }}}}{self.without_system}{{{{ end }}}}"
        branches = [
            f'{{{{ {"if" if number == 0 else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for number, (role, (before, after)) in enumerate(self.around.items())
        ]
        return f"{begin}{{{{ range .Messages }}}}{''.join(branches)}{{{{ end }}}}{{{{ end }}}}{self.prompt}"


def write_modelfile(folder: Path, *, gguf: Path, tokenizer: Any, variables: Mapping[str, Any] | None = None) -> Path:
    """Write the Modelfile of a GGUF file in the same folder, and return its path.

    The folder has the generation configuration; the GGUF file need not be there yet. Without a chat template the prompt
    is plain text. The variables are those that the chat template gets.

    Raises:
        UnsupportedModelError: The chat template does more than to write text around each message.
    """
    file = folder / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    has_template = getattr(tokenizer, "chat_template", None) is not None
    template = read_turns(tokenizer, variables).go() if has_template else "{{ .Prompt }}"
    lines = [f"FROM ./{gguf.name}", f'TEMPLATE """{template}"""']
    if has_template and "strftime_now" in str(tokenizer.chat_template):
        lines.insert(0, f"# The chat template writes the current date. Here it is that of the export, {date.today()}.")
    ends = list_stops(generation.get("eos_token_id"))
    tokens = [tokenizer.decode([end]) for end in ends] if tokenizer is not None else []
    if tokenizer is not None and tokenizer.eos_token:
        tokens.append(tokenizer.eos_token)
    lines += [f"PARAMETER stop {json.dumps(token, ensure_ascii=False)}" for token in dict.fromkeys(tokens)]
    lines += [
        f"PARAMETER {ours} {generation[name]}" for name, ours in _PARAMETERS.items() if generation.get(name) is not None
    ]
    path = folder / "Modelfile"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def find_missing_gguf(folder: Path) -> list[str]:
    """Return the GGUF files that the Modelfile of a folder names and the folder lacks; none without a Modelfile."""
    path = folder / "Modelfile"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    named = re.findall(r"^\s*(?:FROM|ADAPTER)\s+(\S+\.gguf)\s*$", text, re.MULTILINE | re.IGNORECASE)
    return [name.removeprefix("./") for name in named if not (folder / name).is_file()]


def read_turns(tokenizer: Any, variables: Mapping[str, Any] | None = None) -> Turns:
    """Return the parts of a chat template, which must render conversations exactly as the template does.

    The variables are those that the template gets. The token that begins a text is dropped, because llama.cpp adds it.

    Raises:
        UnsupportedModelError: The parts do not render like the template.
    """
    render = partial(_render, tokenizer, variables or {})
    one = [{"role": "user", "content": _CONTENT["user"]}]
    more = [*one, {"role": "assistant", "content": _CONTENT["assistant"]}, *one]
    try:
        turns = _split(render, one=one, more=more)
    except ValueError as error:
        raise _refuse(str(error)) from error
    system = [{"role": "system", "content": _CONTENT["system"]}]
    checked = [one, more, [*more, *more[1:]]]
    if "system" in turns.around:
        checked += [[*system, *one], [*system, *more]]
    for messages in checked:
        if turns.render(messages) != render(messages):
            raise _refuse(f"a conversation of {len(messages)} messages is rendered otherwise")
    texts = (turns.without_system, turns.prompt, *(text for pair in turns.around.values() for text in pair))
    if any("{{" in text or '"""' in text for text in texts):
        raise _refuse("its text holds braces or quotes of the Modelfile")
    return turns


def _split(render: Callable[..., str], *, one: Sequence[Message], more: Sequence[Message]) -> Turns:
    """Return the text around the content of each message; raise ValueError where a content is missing."""
    lead, end = _cut(render(one), _CONTENT["user"])
    _, bare_end = _cut(render(one, has_prompt=False), _CONTENT["user"])
    # Some templates end with an end-of-text token instead of the prompt.
    tail = _common_start(end, bare_end)
    prompt = end[len(tail) :]
    long = render(more, has_prompt=False)
    _, rest = _cut(long, _CONTENT["user"])
    middle, rest = _cut(rest, _CONTENT["assistant"])
    last, _ = _cut(rest, _CONTENT["user"])
    if not middle.startswith(tail):
        raise ValueError("the end of a message depends on the next one")
    # After a default system message both also have the end of the message before.
    user_begin = _common_start(lead[::-1], last[::-1])[::-1].removeprefix(tail)
    around = {"user": (user_begin, tail), "assistant": (middle[len(tail) :], last[: len(last) - len(user_begin)])}
    begin = lead[: len(lead) - len(user_begin)]
    try:
        both = render([{"role": "system", "content": _CONTENT["system"]}, *one], has_prompt=False)
        before, after = _cut(both, _CONTENT["system"])
        after, _ = _cut(after, _CONTENT["user"])
    except ValueError:
        # No system message: Ollama must not be given one.
        return Turns(around, begin, prompt)
    if not after.endswith(user_begin):
        raise ValueError("a system message changes the message after it")
    return Turns({"system": (before, after[: len(after) - len(user_begin)]), **around}, begin, prompt)


def _render(
    tokenizer: Any, variables: Mapping[str, Any], messages: Sequence[Message], *, has_prompt: bool = True
) -> str:
    """Return the text of the template without the token that begins it; raise ValueError where it refuses."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=has_prompt, **variables
        )
    except TemplateError as error:
        raise ValueError(str(error)) from error
    return str(text).removeprefix(tokenizer.bos_token or "")


def _cut(text: str, content: str) -> tuple[str, str]:
    """Return the text before and after the first place of a content."""
    before, found, after = text.partition(content)
    if not found:
        raise ValueError("a message is left out or changed")
    return before, after


def _common_start(one: str, other: str) -> str:
    """Return the longest common beginning of two texts."""
    length = next((place for place, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
    return one[:length]


def _refuse(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The chat template cannot be written for Ollama: {reason}. Export without --ollama: Ollama reads the template "
        "from the GGUF file where it knows the family."
    )
