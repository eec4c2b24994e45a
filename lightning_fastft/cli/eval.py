"""``fastft eval``: perplexity, exact match and tasks of lm-eval of a trained model."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_fastft.cli.arguments import (
    Arguments,
    add_data_options,
    data_options_named,
    read_data_options,
    take_columns,
)
from lightning_fastft.cli.trained.opening import add_options, read_request
from lightning_fastft.core.checks import check_int
from lightning_fastft.core.errors import MissingDependencyError, OptionError
from lightning_fastft.core.extras import pip_line
from lightning_fastft.packing.reading.sources import check_exists

if TYPE_CHECKING:
    from lightning_fastft.packing.loader import DocumentSubset
    from lightning_fastft.training.fine_tuner import FineTuner

# An answer may be longer than the right one by this many tokens, to be seen as wrong.
_MORE_TOKENS = 16
# Length of a pack, and rows that are answered at once.
_MAX_TOKENS, _BATCH_SIZE = 8192, 16


def run_eval(words: Sequence[str]) -> int:
    """Print what a trained model reaches on held-out data; return 0.

    Args:
        words: A checkpoint, a PEFT folder or a whole model's folder, and ``--data FILE`` and/or ``--tasks NAMES`` of
            lm-eval. ``--exact-match`` generates greedily and compares. ``--max-tokens N`` (8192) is the length of a
            pack, ``--batch-size N`` (16) that of generation, ``--limit N`` the most rows to answer and the most
            examples of a task, ``--json`` prints one JSON object. ``--too-long``, ``--max-reject-share``,
            ``--extra-columns``, ``--chat-template``, ``--chat-template-kwargs`` and ``--cache-dir`` are the options of
            PackedDataModule. Without ``--chat-template`` the variables of the run are given to its template too.
            ``--data.columns.OURS YOURS``, ``--base``, ``--tokenizer``, ``--device`` and ``--accept-other-base`` as for
            fit and export.

    Raises:
        OptionError: A value is not allowed.
        DataError: The data cannot be read, or has no prompts to answer.
        MissingDependencyError: ``--tasks`` without lm-eval.
    """
    args = _parse_args(words)
    from lightning_fastft.cli.trained.opening import open_trained

    opened = open_trained(args.request)
    results: dict[str, Any] = {"model": str(args.request.source)}
    if args.data:
        results |= _evaluate(opened.module, args)
    if args.tasks:
        results["tasks"] = _run_tasks(opened.module, args)
    sys.stdout.write(json.dumps(results) + "\n" if args.json else _render(results))
    return 0


def _evaluate(module: FineTuner, args: Namespace) -> dict[str, Any]:
    """Return loss, perplexity and token accuracy of the labelled tokens, and exact matches if asked for."""
    from lightning.pytorch import Trainer

    from lightning_fastft.strategies.single_device import FastFTStrategy
    from lightning_fastft.training.datamodule import PackedDataModule

    # The variables of a run belong to its template.
    trained = {} if "chat_template" in args.reading else module.chat_template_kwargs
    args.reading["chat_template_kwargs"] = {**trained, **args.reading.get("chat_template_kwargs", {})}
    data = PackedDataModule(
        None,
        test_paths=args.data,
        max_tokens=args.max_tokens,
        show_progress=not args.json,
        **args.reading,
    )
    trainer = Trainer(
        accelerator=args.request.device.type,
        strategy=FastFTStrategy(),
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=not args.json,
        enable_model_summary=False,
    )
    with data_options_named():
        [found] = trainer.test(module, datamodule=data, verbose=False)
    subset = data.subset("test")
    assert subset is not None
    results = {
        "data": args.data,
        "examples": len(subset),
        "labelled_tokens": int(subset.num_labelled_N.sum()),
        **{name.removeprefix("test_"): value for name, value in found.items()},
    }
    if args.exact_match:
        results |= _match(module, subset, args=args)
    return results


def _match(module: FineTuner, subset: DocumentSubset, *, args: Namespace) -> dict[str, Any]:
    """Return the share of greedy answers that equal the text of the data, and their number."""
    from lightning_fastft.hf.generation import answer_prompts
    from lightning_fastft.packing.document import last_turn

    tokenizer = module.tokenizer
    if tokenizer is None:
        raise OptionError(f"{args.request.source} has no tokenizer, which --exact-match needs. Save one there.")
    turns = [last_turn(subset[number]) for number in range(len(subset))][: args.limit]
    turns = [(prompt, answer) for prompt, answer in turns if prompt]
    if not turns:
        raise OptionError("--exact-match needs rows with a prompt, and every token here is trained. Remove it.")
    # Rows of like length share a batch.
    turns.sort(key=lambda turn: len(turn[0]))
    num_right = 0
    for start in range(0, len(turns), args.batch_size):
        prompts, expected = zip(*turns[start : start + args.batch_size])
        answers = answer_prompts(
            module.model,
            tokenizer=tokenizer,
            prompts=prompts,
            max_new_tokens=max(map(len, expected)) + _MORE_TOKENS,
        )
        right = tokenizer.batch_decode(expected, skip_special_tokens=True)
        num_right += sum(one.strip() == other.strip() for one, other in zip(answers, right))
    return {"exact_match": num_right / len(turns), "answered": len(turns)}


def _run_tasks(module: FineTuner, args: Namespace) -> dict[str, Any]:
    """Return the results of lm-eval by task."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=module.model, tokenizer=module.tokenizer, batch_size=args.batch_size)
    found = lm_eval.simple_evaluate(model=model, tasks=args.tasks, limit=args.limit)
    results: dict[str, Any] = found["results"]
    return results


def _render(results: dict[str, Any]) -> str:
    """Return results as lines of text."""
    lines = []
    for name, value in results.items():
        if name == "tasks":
            for task, figures in value.items():
                lines += [f"{task} {key}: {_show(figure)}" for key, figure in figures.items() if key != "alias"]
        else:
            lines.append(f"{name.replace('_', ' ')}: {_show(value)}")
    return "\n".join(lines) + "\n"


def _show(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _parse_args(words: Sequence[str]) -> Namespace:
    """Parse and check the command line."""
    columns, words = take_columns(words)
    arguments = Arguments("eval")
    arguments.add_argument("source", metavar="CHECKPOINT|FOLDER")
    add_options(arguments)
    arguments.add_argument("--data", default="")
    arguments.add_argument("--max-tokens", type=int)
    add_data_options(arguments)
    arguments.add_argument("--exact-match", action="store_true")
    arguments.add_argument("--batch-size", type=int)
    arguments.add_argument("--limit", type=int)
    arguments.add_argument("--tasks", default="")
    arguments.add_argument("--json", action="store_true")
    given = arguments.read(words)
    given.reading = read_data_options(given, columns=columns)
    given.tasks = [name for name in given.tasks.split(",") if name]
    if not given.data and not given.tasks:
        raise OptionError("fastft eval needs --data FILE or --tasks NAMES of lm-eval.")
    if given.exact_match and not given.data:
        raise OptionError("--exact-match needs --data FILE.")
    _check_idle(given)
    given.max_tokens = check_int("--max-tokens", _MAX_TOKENS if given.max_tokens is None else given.max_tokens, low=2)
    given.batch_size = check_int("--batch-size", _BATCH_SIZE if given.batch_size is None else given.batch_size, low=1)
    if given.limit is not None:
        check_int("--limit", given.limit, low=1)
    if given.tasks and find_spec("lm_eval") is None:
        raise MissingDependencyError(f"--tasks needs lm-eval: {pip_line('eval')}")
    if given.data:
        check_exists(given.data)
    given.request = read_request(given)
    return given


def _check_idle(given: Namespace) -> None:
    """Raise if an option of generation or of data is given to an evaluation without it."""
    names = ("limit", "batch_size") if not (given.exact_match or given.tasks) else ()
    idle = [name for name in names if getattr(given, name) is not None]
    needed = "--exact-match or --tasks: the loss is that of all rows"
    if not given.data:
        idle = [*given.reading, *(["max_tokens"] if given.max_tokens is not None else [])]
        needed = "--data FILE"
    if idle:
        options = ", ".join("--data.columns" if name == "columns" else f"--{name.replace('_', '-')}" for name in idle)
        raise OptionError(f"{options} would have no effect without {needed}.")
