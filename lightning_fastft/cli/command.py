"""The ``fastft`` command: dispatch to subcommands, and turn errors into exit codes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lightning_fastft.cli.answers import explain_missing_files
from lightning_fastft.cli.lightning_cli import FastFTCLI, config_names
from lightning_fastft.cli.noise import without_noise
from lightning_fastft.core.errors import FastFTError, OptionError, printable

USAGE = """\
fastft: fine-tune Hugging Face causal language models with PyTorch Lightning.

  fastft fit      --config NAME|FILE [--key value ...]   train
  fastft validate --config NAME|FILE [--key value ...]   loss, perplexity and token accuracy on the validation data
  fastft test     --config NAME|FILE [--key value ...]   the same on the test data
  fastft data     --config NAME|FILE [--out FOLDER]      what the data module would do, without training
  fastft doctor   --config NAME|FILE                     what is active on this machine, and why not, without training
  fastft plan     --config NAME|FILE [--gpu NAME]        the memory plan of a config and its cost, without training
  fastft export CHECKPOINT|FOLDER OUT [--merge]          adapters or merged weights as a plain Hugging Face folder
  fastft demo                                            the whole job on data that it makes itself
  fastft bench    [--workload NAME] [--out FOLDER]       speed and memory against other systems

Any option of a config can be given on the command line: --data.paths train.jsonl --trainer.max_steps 100
Values that name classes may come from lightning, torch, torchmetrics, peft, lightning_fastft and transformers'
schedulers;
--allow-import my_package adds a package of yours, found from the current folder too.
All options: fastft fit --help.  Shipped configs: {configs}
"""


def main(args: Sequence[str] | None = None) -> int:
    """Run the ``fastft`` command and return its exit status.

    Args:
        args: Words of the command line without the name of the program; None for those of this process.
    """
    words = list(sys.argv[1:] if args is None else args)
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(USAGE.format(configs=", ".join(config_names())))
        return 0
    try:
        with without_noise():
            return _run(words[0], words[1:])
    except FastFTError as error:
        sys.stderr.write(f"error: {type(error).__name__}: {error}\n")
        return 1
    # transformers raises either for a missing or damaged model folder.
    except (OSError, ValueError) as error:
        answer = explain_missing_files(error)
        if not answer:
            raise
        sys.stderr.write(printable(answer, keeps_lines=True))
        return 1


def _run(command: str, words: list[str]) -> int:
    if command in FastFTCLI.subcommands():
        FastFTCLI([command, *words])
        return 0
    # Imported on use, because each command has imports that the others do not need.
    if command == "data":
        from lightning_fastft.cli.data import run_data

        return run_data(words)
    if command == "doctor":
        from lightning_fastft.cli.doctor import run_doctor

        return run_doctor(words)
    if command == "plan":
        from lightning_fastft.cli.plan import run_plan

        return run_plan(words)
    if command == "export":
        from lightning_fastft.cli.export import run_export

        return run_export(words)
    if command == "demo":
        from lightning_fastft.cli.demo import run_demo

        return run_demo(words)
    if command == "bench":
        from lightning_fastft.cli.bench import run_bench

        return run_bench(words)
    raise OptionError(
        f"Unknown command {command!r}. Allowed are fit, validate, test, data, doctor, plan, export, demo and bench."
    )
