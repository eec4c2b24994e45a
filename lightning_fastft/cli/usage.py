"""Help of the ``fastft`` command and of its subcommands."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from lightning_fastft.cli.signatures import read_options
from lightning_fastft.cli.words import DEFAULT_CLASSES, TRAINER_CLASS, TRAINER_DEFAULTS
from lightning_fastft.core.extras import pip_line

USAGE = """\
fastft: fine-tune Hugging Face causal language models with PyTorch Lightning.

  fastft init     --model NAME --data FILE [--gpu NAME]  write a config for a model, data and a GPU
  fastft fit      --config NAME|FILE [--key value ...]   train
  fastft validate --config NAME|FILE [--key value ...]   loss, perplexity and token accuracy on the validation data
  fastft test     --config NAME|FILE [--key value ...]   the same on the test data
  fastft data     --config NAME|FILE [--out FOLDER]      what the data module would do, without training
  fastft doctor   [--config NAME|FILE]                   what is active on this machine, and why not, without training
  fastft plan     --config NAME|FILE [--gpu NAME]        the memory plan of a config and its cost, without training
  fastft report   RUN RUN ... [--out FILE]               compare runs by their reports
  fastft chat   CHECKPOINT|FOLDER [--system TEXT]        talk with a trained model
  fastft eval   CHECKPOINT|FOLDER --data FILE            perplexity and exact match on held-out data, tasks of lm-eval
  fastft export CHECKPOINT|FOLDER OUT [--merge]          adapters or merged weights as a folder, GGUF, or for Ollama
  fastft push   CHECKPOINT|FOLDER REPO [--yes]           upload with a model card; without --yes only shows it
  fastft convert FOLDER OUT                              a LitGPT checkpoint as a Hugging Face folder
  fastft demo                                            the whole job on data that it makes itself
  fastft bench    [--workload NAME] [--out FOLDER]       speed and memory against other systems

Any option of a config can be given on the command line: --data.paths train.jsonl --trainer.max_steps 100
Values that name classes may come from lightning, torch, torchmetrics, peft and lightning_fastft. --allow-import
my_package adds your own package; the current folder is searched too.
All options: fastft fit --help.  Shipped configs: {configs}
"""
_OPTIONS_OF_FIT = "Any option of a config can be given too; all of them: fastft fit --help\n"
_OPTIONS_OF_MODELS = """\
  --base NAME               the base model, if it has moved since training
  --tokenizer NAME          the tokenizer, if it has moved since training
  --device NAME             where the model is built ({device})
  --accept-other-base       accept a base with other weights than those of the run
"""
# Options of the parser, in addition to those of classes: form of the value, and meaning.
PARSER_OPTIONS = {
    "config": ("NAME|FILE", "a shipped config or a file; a later one replaces values of an earlier one"),
    "c": ("NAME|FILE", "the same"),
    "help": ("", "this help; --model.help CLASS, --data.help CLASS and --trainer.callbacks.help CLASS for a class"),
    "h": ("", "the same"),
    "print_config": ("", "print the config after all options, and exit"),
    "seed_everything": ("SEED", "seed of all random numbers (1)"),
    "model": ("CLASS", f"what is trained ({DEFAULT_CLASSES['model']})"),
    "data": ("CLASS", f"the data module ({DEFAULT_CLASSES['data']})"),
    "trainer": ("FILE", "options of the Trainer from a file"),
}
CHECKPOINT_OPTIONS = {
    "ckpt_path": ("PATH|last", "a checkpoint of an earlier run: to resume, or to validate or test"),
    "verbose": ("BOOL", "whether the values are printed (true)"),
}
_PURPOSES = {
    "fit": "Train.",
    "validate": "Loss, perplexity and token accuracy on the validation data.",
    "test": "Loss, perplexity and token accuracy on the test data.",
}
# By subcommand. Those of the Trainer are in ``help_of``.
HELP = {
    "init": """\
fastft init --model NAME --data FILE [--gpu NAME] [--method NAME] [--out FILE] [--overwrite]
Look at the data, the model's shapes and a GPU, and write a config that fastft fit --config FILE runs.

  --model NAME              hub id or folder of the model; a folder with config.json alone is enough
  --data FILE               file or folder (.jsonl, .json, .parquet, .csv, .tsv) or hub id of the training data
  --gpu NAME                a GPU by name, for example "RTX 4090" (the GPU of this machine)
  --method NAME             auto, qlora, lora or full (auto: lora where it fits and is about as fast, else qlora)
  --out FILE                the config (config.yaml)
  --overwrite               replace a config that is there
  --max-reject-share X      largest share of rows that may be rejected (0.01)
  --extra-columns NAME      of columns that the first rows do not have: refuse or ignore (refuse)
  --chat-template FILE      a .jinja file in place of the tokenizer's chat template
  --chat-template-kwargs JSON
                            variables of the chat template, for example '{"enable_thinking": false}'
  --cache-dir FOLDER        where tokens are cached; null keeps them in memory (the user's cache folder)
  --data.columns.OURS YOURS names of the data's columns, for example --data.columns.prompt question
""",
    "data": f"""\
fastft data --config NAME|FILE [--out FOLDER] [--key value ...]
What the data module would do, without a model and without training: formats, rejected rows, lengths, packs, an example.

  --out FOLDER              where the page data.html and the rejected rows are written (runs/data)

{_OPTIONS_OF_FIT}""",
    "doctor": f"""\
fastft doctor [--config NAME|FILE] [--key value ...]
What this machine can do, and which extra is missing. With a config: what is active, and why not, by one step of a
miniature of the model, without its weights and data.

{_OPTIONS_OF_FIT}""",
    "plan": f"""\
fastft plan --config NAME|FILE [--gpu NAME] [--key value ...]
The activation plan of a config on a GPU and its cost, without weights, data or training.

  --gpu NAME                a GPU by name, for example "RTX 4090" (the GPU of this machine)
  --vram-gib N              vram_budget of the run (the config's, else model, optimizer and 90 % of the rest)
  --host-gib N              pinned host memory of the run (the config's, else 64)
  --document-tokens N       average length of the document of a token (1024)
  --gpus N [--nodes M]      compare DDP, FSDP2, hybrid sharding, expert and context parallelism on a cluster
  --node-link L             nvlink, pcie or GB/s of a GPU each way (the GPU's own)
  --network L               infiniband (400 Gbit/s per GPU), ethernet (100 Gbit/s per node) or GB/s of a node each way
  --step-ms N               measured time of one pack on one GPU; default: estimated

{_OPTIONS_OF_FIT}""",
    "report": """\
fastft report RUN RUN [RUN ...] [--out FILE]
Compare 2 to 12 runs that had the callback RunReport: their figures, curves, and the options that differ.

  RUN                       folder of a run with one run_report.json in it or below it, or the file itself
  --out FILE                the page (runs/comparison.html)
""",
    "chat": f"""\
fastft chat CHECKPOINT|FOLDER [--system TEXT] [--plain] [--max-new-tokens N] [--temperature T]
Talk with a trained model: answers appear as they are generated. /reset starts a new conversation, /quit or Ctrl-D ends
the chat, Ctrl-C ends an answer. Lines of a pipe are answered in turn. Without a chat template each line is text to
continue.

  --system TEXT             the system message
  --chat-template-kwargs JSON
                            variables of the chat template, for example '{{"enable_thinking": false}}', in
                            addition to those of the run
  --plain                   continue each line as it is, as models trained on prompt and completion expect
  --max-new-tokens N        most tokens of an answer (512)
  --temperature T           0 takes the most likely token (as the model's generation_config.json says)
{_OPTIONS_OF_MODELS.format(device="the GPU, else cpu")}""",
    "eval": f"""\
fastft eval CHECKPOINT|FOLDER --data FILE [--exact-match] [--tasks NAMES] [--json]
Loss, perplexity and token accuracy over the trained tokens of held-out data, packed as in validation.

  --data FILE               file or folder (.jsonl, .json, .parquet, .csv, .tsv) or hub id
  --max-tokens N            length of a pack (8192)
  --too-long NAME           of rows longer than a pack: refuse, truncate or split (refuse)
  --max-reject-share X      largest share of rows that may be rejected (0.01)
  --extra-columns NAME      of columns that the first rows do not have: refuse or ignore (refuse)
  --chat-template FILE      a .jinja file in place of the tokenizer's chat template
  --chat-template-kwargs JSON
                            variables of the chat template, in addition to those of the run
  --cache-dir FOLDER        where tokens are cached; null keeps them in memory (the user's cache folder)
  --exact-match             also generate the answer of each row, and compare it as text
  --batch-size N            rows that are answered at once (16)
  --limit N                 most rows to answer, and most examples of a task
  --tasks NAMES             tasks of lm-eval, separated by commas (needs: {pip_line("eval")})
  --json                    print one JSON object
  --data.columns.OURS YOURS names of the data's columns, for example --data.columns.prompt question
{_OPTIONS_OF_MODELS.format(device="the GPU, else cpu")}""",
    "export": f"""\
fastft export CHECKPOINT|FOLDER OUT [--merge] [--dtype NAME] [--for vllm] [--gguf TYPE] [--ollama]
Write the adapters of a checkpoint or of a PEFT folder as a plain Hugging Face folder with a model card, and load it
again to compare.

  --merge                   merge the adapters into the weights of the whole model
  --dtype NAME              of merged weights: auto, bfloat16, float16 or float32 (auto)
  --for vllm                refuse adapters of which vLLM would not read a part
  --gguf TYPE               merge, and convert with llama.cpp to q8_0, f16, bf16 or f32; exit status 3 and the command
                            to run where llama.cpp is not found
  --llama-cpp FOLDER        a clone of llama.cpp (convert_hf_to_gguf.py is searched on PATH)
  --ollama                  a Modelfile next to the GGUF file, with the chat template and parameters
{_OPTIONS_OF_MODELS.format(device="cpu")}""",
    "push": f"""\
fastft push CHECKPOINT|FOLDER REPO [--yes] [--private] [--merge]
Show the files and the model card of a repository on huggingface.co; upload them with --yes, after hf auth login.

  --yes                     upload
  --dry-run                 only show, as without --yes
  --private                 make a new repository private; refuse a public one
  --merge                   merge the adapters into the weights of the whole model
{_OPTIONS_OF_MODELS.format(device="cpu")}""",
    "convert": """\
fastft convert FOLDER OUT
Write a LitGPT checkpoint (lit_model.pth, model_config.yaml, config.json, tokenizer files) as a Hugging Face folder, and
load it with transformers. Needs litgpt, whose own converter names the weights: pip install litgpt
""",
    "demo": f"""\
fastft demo [--key value ...]
The whole job on data that it makes itself, in runs/demo: train, validate, answer, save, load again and compare.

{_OPTIONS_OF_FIT}""",
    "bench": """\
fastft bench [--workload NAME] [--out FOLDER] [options of benchmarks.compare]
Speed and memory against other systems.

  --workload NAME           the largest that fits the GPU, unless named
  --out FOLDER              where the results are written (a new folder in runs/compare)

All options: python -m benchmarks.compare --help, in a clone of the repository
""",
}


def parser_options(command: str) -> dict[str, tuple[str, str]]:
    """Return the options of a command that belong to no class: form of the value, and meaning."""
    names = {"fit": ("ckpt_path",), "demo": ("ckpt_path",), "validate": ("ckpt_path", "verbose")}
    names["test"] = names["validate"]
    return {**PARSER_OPTIONS, **{name: CHECKPOINT_OPTIONS[name] for name in names.get(command, ())}}


def help_of(command: str) -> str:
    """Return the help of a subcommand of the Trainer: every option, read from the source of its class."""
    lines = [f"fastft {command} --config NAME|FILE [--key value ...]", _PURPOSES[command], ""]
    for name, (value, meaning) in parser_options(command).items():
        dashes = "-" if len(name) == 1 else "--"
        lines.append(f"  {f'{dashes}{name} {value}':<25} {meaning}")
    lines.append(f"  {'--allow-import PACKAGE':<25} let options name classes of this package too; not in a file")
    lines += ["", "Options of the Trainer:", *_describe("trainer", TRAINER_CLASS, TRAINER_DEFAULTS)]
    for key, owner in DEFAULT_CLASSES.items():
        lines += ["", f"Options of {owner}, where --{key} names no other class:", *_describe(key, owner, {})]
    return "\n".join(lines) + "\n"


def _describe(key: str, owner: str, defaults: dict[str, str]) -> Iterator[str]:
    """Yield each option of a class with its type and default, followed by its meaning."""
    for name, option in read_options(owner).items():
        default = repr(defaults[name]) if name in defaults else option.default
        kind = f" {option.type}" if option.type else ""
        yield f"  --{key}.{name}{kind}" + (" (required)" if default is None else f" = {default}")
        yield from textwrap.wrap(option.meaning, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
