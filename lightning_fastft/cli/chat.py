"""``fastft chat``: talk with a trained model in the terminal, or answer the lines of a pipe."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_fastft.cli.arguments import Arguments, data_options_named, read_variables
from lightning_fastft.cli.trained.opening import add_options, read_request
from lightning_fastft.core.checks import check_float, check_int
from lightning_fastft.core.errors import OptionError, printable

if TYPE_CHECKING:
    from lightning_fastft.training.fine_tuner import FineTuner

QUIT, RESET, HELP = "/quit", "/reset", "/help"
_HELP = f"""\
{RESET}   start a new conversation
{QUIT}    end the chat, as Ctrl-D does
Ctrl-C   ends an answer
"""
_PROMPT = "> "
_COMMAND = re.compile(r"/[a-z]+")


def run_chat(words: Sequence[str]) -> int:
    """Read lines and write an answer to each as it is generated, until ``/quit`` or the end of the input; return 0.

    ``/reset`` starts a new conversation, ``/help`` lists the commands.

    Args:
        words: A checkpoint, a PEFT folder or a whole model's folder. ``--system TEXT`` begins the conversation,
            ``--chat-template-kwargs JSON`` adds to the variables that the run gave to the chat template, ``--plain``
            continues each line as it is, without the chat template, ``--max-new-tokens N`` (512) bounds an
            answer, ``--temperature T`` is that of the sampling (0: none; by default that of the model's generation
            configuration). ``--base``, ``--tokenizer``, ``--device`` and ``--accept-other-base`` as for export.

    Raises:
        OptionError: A value is not allowed, or there is no tokenizer.

    Cost:
        One host sync per generated token.
    """
    args = _parse_args(words)
    from lightning_fastft.cli.trained.opening import open_trained

    opened = open_trained(args.request)
    has_template = _uses_template(args, opened.module.tokenizer, name=opened.base)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        kind = "a chat" if has_template else "plain text to continue, without a chat template"
        sys.stdout.write(f"{args.source}: {kind}. {HELP} lists the commands, {QUIT} ends it.\n")
    begin: list[dict[str, str]] = [{"role": "system", "content": args.system}] if args.system else []
    history = begin
    while line := _read_line(is_terminal):
        # A byte that is not UTF-8 is read as a surrogate, which no tokenizer takes.
        text = line.rstrip("\n").encode(errors="surrogateescape").decode(errors="replace")
        command = text.strip()
        if command == QUIT:
            break
        if command == RESET:
            history = begin
        elif command == HELP:
            sys.stdout.write(_HELP)
        elif is_terminal and _COMMAND.fullmatch(command):
            sys.stdout.write(f"There is no command {command}; {HELP} lists them.\n")
        elif command:
            asked = [*history, {"role": "user", "content": text}]
            answer = _answer(opened.module, asked if has_template else text, args=args)
            if answer is not None and has_template:
                history = [*asked, {"role": "assistant", "content": answer}]
    return 0


def _uses_template(args: Namespace, tokenizer: Any, *, name: str) -> bool:
    """Return whether lines become messages of the chat template; refuse what the tokenizer cannot do."""
    from lightning_fastft.packing.rows.template_options import check_template_reads
    from lightning_fastft.packing.tokens.chat import read_template

    if tokenizer is None:
        raise OptionError(f"{name} has no tokenizer, which chat needs. Save one in its folder.")
    has_template = tokenizer.chat_template is not None and not args.plain
    for option, value in (("--system", args.system), ("--chat-template-kwargs", args.chat_template_kwargs)):
        if value and not has_template:
            reason = "--plain uses none" if args.plain else "the tokenizer has none"
            raise OptionError(f"{option} needs a chat template, and {reason}. Remove {option}.")
    if has_template:
        with data_options_named():
            check_template_reads(args.chat_template_kwargs, template=read_template(tokenizer, None))
    return has_template


def _read_line(is_terminal: bool) -> str:
    """Return the next line of the input, "" at its end."""
    if is_terminal:
        sys.stdout.write(_PROMPT)
        sys.stdout.flush()
    try:
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        line = ""
    if is_terminal and not line:
        # The shell's prompt comes on a line of its own.
        sys.stdout.write("\n")
    return line


def _answer(module: FineTuner, prompt: Any, *, args: Namespace) -> str | None:
    """Write an answer while it is generated and return it; None if it was interrupted."""
    from lightning_fastft.hf.generation import stream_to

    options: dict[str, Any] = {}
    if args.temperature is not None:
        is_sampled = args.temperature > 0
        options = {"do_sample": is_sampled, **({"temperature": args.temperature} if is_sampled else {})}
    try:
        [answer] = module.generate(
            [prompt],
            max_new_tokens=args.max_new_tokens,
            chat_template_kwargs=args.chat_template_kwargs,
            streamer=stream_to(_write, tokenizer=module.tokenizer),
            **options,
        )
    except KeyboardInterrupt:
        answer = None
    _write("\n")
    return answer


def _write(text: str) -> None:
    """Write text of a model, which cannot steer the terminal."""
    sys.stdout.write(printable(text, keeps_lines=True))
    sys.stdout.flush()


def _parse_args(words: Sequence[str]) -> Namespace:
    """Parse and check the command line."""
    arguments = Arguments("chat")
    arguments.add_argument("source", metavar="CHECKPOINT|FOLDER")
    add_options(arguments)
    arguments.add_argument("--system", default="")
    arguments.add_argument("--chat-template-kwargs")
    arguments.add_argument("--plain", action="store_true")
    arguments.add_argument("--max-new-tokens", type=int, default=512)
    arguments.add_argument("--temperature", type=float)
    given = arguments.read(words)
    check_int("--max-new-tokens", given.max_new_tokens, low=1)
    if given.temperature is not None:
        check_float("--temperature", given.temperature, low=0.0)
    given.chat_template_kwargs = read_variables(given.chat_template_kwargs)
    given.request = read_request(given)
    return given
