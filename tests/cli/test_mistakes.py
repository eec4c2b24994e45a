"""Mistakes are answered before torch is imported, as the parser answers them, and nothing that it takes is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_fastft
from lightning_fastft import PackedDataModule, RolloutDataModule
from lightning_fastft.cli import mistakes
from lightning_fastft.cli.lightning_cli import SHORT_NAMES, FastFTArgumentParser, FastFTCLI
from lightning_fastft.cli.mistakes import check_words
from lightning_fastft.cli.signatures import read_options
from lightning_fastft.cli.usage import HELP, parser_options
from lightning_fastft.cli.words import TRAINER_COMMANDS
from lightning_fastft.core.errors import DataError, FastFTError, OptionError

ROOT = Path(lightning_fastft.__file__).parents[1]
HEAVY = {"torch", "lightning", "transformers", "peft", "bitsandbytes", "datasets", "jsonargparse", "numpy"}
CONFIG = ["--config", "qlora_qwen3_8b"]
OK = ["--model.model", "x", "--data.paths", "y"]
# Words, exit status, and a part of the answer.
ANSWERED = [
    ([], 0, "fastft plan"),
    (["--help"], 0, "fastft plan"),
    *(([command, "--help"], 0, f"fastft {command}") for command in (*HELP, *TRAINER_COMMANDS)),
    (["fti"], 1, "Did you mean fit?"),
    (["fit", "--config", "qlora_qwen_8b"], 1, "Did you mean qlora_qwen3_8b?"),
    (["fit", "--config"], 1, "--config has no value"),
    (["data", "--config", ""], 1, "--config has no value"),
    (["doctor", "--config=nope.yaml"], 1, "no file and no shipped config named 'nope.yaml'"),
    (["fit", *CONFIG], 1, "There is no file or folder train.jsonl"),
    (["fit", *CONFIG, "--data.paths", "nope.jsonl"], 1, "There is no file or folder nope.jsonl"),
    (["data", *CONFIG, "--data.init_args.paths=[/nope]", "--out", "x"], 1, "There is no file or folder /nope"),
    (["fit", "--config", "grpo_qwen3_0.6b"], 1, "There is no file or folder prompts.jsonl"),
    (["doctor", *CONFIG, "--data.paths", "nope.jsonl"], 1, "There is no file or folder nope.jsonl"),
    (["validate", *CONFIG, "--ckpt_path", "nope.ckpt"], 1, "there is nothing at nope.ckpt"),
    (["fit", "--ckpt_path=s3://nope.ckpt"], 1, "ckpt_path must be a local file or folder"),
    (["init", "--modle", "x"], 1, "Did you mean --model?"),
    (["init", "--model", "x"], 1, "fastft init needs --data"),
    (["init", "--model", "x", "--dataset", "y"], 1, "Did you mean --data?"),
    (["init", "--model", "x", "--data", "y", "--max-seq-length", "64"], 1, "fastft fit: --data.max_tokens"),
    (["init", "--model", "x", "--data", "y", "--trainer.max_steps", "64"], 1, "fastft fit: --trainer.max_steps"),
    (["init", "--model", "x", "--data", "y", "--method", "LoRA"], 1, "Did you mean lora?"),
    (["init", "--model", "x", "--data", "y", "--method", "peft"], 1, "Did you mean lora?"),
    (["init", "--model", "x", "--data", "y", "--output-dir", "z"], 1, "Did you mean --out?"),
    (["init", "--model", "x", "--data", "y", "--force"], 1, "Did you mean --overwrite?"),
    (["init", "--model", "x", "--data", "y", "--columns.prompt", "q"], 1, "Did you mean --data.columns.prompt?"),
    (["init", "--model", "x", "--data", "y", "--gpus", "x"], 1, "Did you mean --gpu?"),
    (["init", "--model", "x", "--data", "nope.jsonl"], 1, "There is no file or folder nope.jsonl"),
    (["init", "--model", "./nope", "--data", "y"], 1, "there is nothing at ./nope"),
    (["init", "--model", "x", "--data", "y", "--gpu", "3090"], 1, "RTX 4090"),
    (["init", "--model", "x", "--data", "y", "--out", "/"], 1, "--out must name a .yaml file"),
    (["chat", "nope.ckpt"], 1, "There is nothing at nope.ckpt"),
    (["chat", "x", "--sytem", "y"], 1, "Did you mean --system?"),
    (["chat", ".", "--max-new-tokens", "0"], 1, "--max-new-tokens must be at least 1"),
    (["chat", ".", "--base_model", "y"], 1, "Did you mean --base?"),
    (["chat", "--ckpt", "y"], 1, "without a name: fastft chat CHECKPOINT|FOLDER"),
    (["eval", ".", "--max-seq-length", "9"], 1, "Did you mean --max-tokens?"),
    (["export", ".", "--output", "x"], 1, "without a name: fastft export CHECKPOINT|FOLDER OUT"),
    (["export", "."], 1, "fastft export needs OUT"),
    (["export", ".", "out", "--vllm"], 1, "Did you mean --for vllm?"),
    (["export", ".", "out", "--for", "ollama"], 1, "Did you mean --ollama?"),
    (["export", ".", "out", "--gguf", "q4_k_m"], 1, "llama-quantize"),
    (["export", ".", "out", "--gguf"], 1, "--gguf needs a value"),
    (["push", ".", "--repo-id", "me/mine"], 1, "without a name: fastft push CHECKPOINT|FOLDER REPO"),
    (["eval", "."], 1, "needs --data FILE or --tasks"),
    (["eval", ".", "--data", "nope.jsonl"], 1, "There is no file or folder nope.jsonl"),
    (["eval", ".", "--data", ".", "--limit", "3"], 1, "--limit would have no effect without --exact-match or --tasks"),
    (["eval", ".", "--data", ".", "--batch-size=2"], 1, "--batch-size would have no effect"),
    (["eval", ".", "--tasks", "a", "--max-tokens", "9"], 1, "--max-tokens would have no effect without --data"),
    (["eval", ".", "--tasks", "a", "--too-long", "split"], 1, "--too-long would have no effect without --data"),
    (["eval", ".", "--tasks", "a", "--data.columns.prompt", "q"], 1, "--data.columns would have no effect"),
    (["eval", "nope.ckpt", "--data", "x"], 1, "There is nothing at nope.ckpt"),
    (["push", "nope.ckpt", "me/mine"], 1, "There is nothing at nope.ckpt"),
    (["push", ".", "me/mine"], 1, "not the folder of a model"),
    (["push", ".", "a/b/c"], 1, "REPO must be owner/name"),
    (["push", ".", "me/a--b"], 1, "Cannot have -- or .."),
    (["push", ".", "me/mine.git"], 1, "cannot end by '.git'"),
    (["export", ".", "out", "--gguf", "q4"], 1, "--gguf must be one of"),
    (["export", ".", "out", "--llama-cpp", "nope"], 1, "nope has no convert_hf_to_gguf.py"),
    (["export", "nope.ckpt", "out"], 1, "There is nothing at nope.ckpt"),
    (["export", "nope.ckpt", "out", "--merge", "--dtype", "bf16"], 1, "--dtype must be one of"),
    (["fit", "--model.lr", "1e-3"], 2, "did you mean learning_rate?"),
    (["plan", *CONFIG, "--gpu", "RTX 4090", "--model.lora_r", "8"], 2, "'lora_r' is not accepted"),
    (["demo", "--trainer.max_stps", "3"], 2, "did you mean trainer.max_steps?"),
    (["fit", *CONFIG, "--trainer.max_steps", "abc"], 2, "trainer.max_steps: must be a whole number, got 'abc'"),
    (["data", *CONFIG, "--data.max_tokens=1.5"], 2, "data.max_tokens: must be a whole number, got '1.5'"),
    (["fit", "--config", "grpo_qwen3_0.6b", "--data.top_p", "0.9"], 2, "data.sampling_options.top_p"),
    (["fit", *CONFIG, "--enable_thinking", "false"], 2, "data.chat_template_kwargs.enable_thinking false"),
    (["chat", ".", "--chat-template-kwargs", "{x"], 1, "--chat-template-kwargs is a string that is not valid JSON"),
    (["fit", *CONFIG, "--model.learning_rate", "x"], 2, "model.learning_rate: must be None or a number, got 'x'"),
    (["fit", *CONFIG, "--max-seq-length", "9"], 2, "did you mean data.max_tokens?"),
    (["fit", *CONFIG, "--gpus", "2"], 2, "did you mean trainer.devices?"),
    (["fit", *CONFIG, "--model.rank", "8"], 2, "did you mean model.lora.r?"),
    (["fit", *CONFIG, "--data.path", "x"], 2, "Option 'path' is not accepted by lightning_fastft.PackedDataModule"),
    (["data", *CONFIG, "--max-tokens", "9"], 2, "did you mean data.max_tokens?"),
    (["demo", "--steps", "9"], 2, "did you mean trainer.max_steps?"),
    (["plan", *CONFIG, "--num-gpus", "9"], 2, "did you mean gpus?"),
    (["--version"], 0, "."),
    (["train", "--config", "demo"], 1, "Did you mean fit?"),
    (["fit", "-config", "demo"], 1, "Did you mean --config?"),
    (["fit", "--config", "tops.yaml"], 1, "Did you mean top.yaml?"),
    (["fit", "--config", "tabs.yaml"], 2, "tabs.yaml, line 2: found character '\\t'"),
    (["fit", *CONFIG, "--data.paths"], 2, "--data.paths needs a value"),
    (["fit", *CONFIG, "--data", "me/mine"], 2, "Did you mean --data.paths me/mine?"),
    (["fit", *CONFIG, "--model", "Qwen/Qwen3-8B"], 2, "Did you mean --model.model Qwen/Qwen3-8B?"),
    (["fit", *CONFIG, "--learning_rate", "1"], 2, "did you mean model.learning_rate?"),
    (["fit", *CONFIG, "--data.train_on_inputs", "true"], 2, "data.loss_on all"),
    (["fit", *CONFIG, "--trainer.num_train_epochs", "1"], 2, "did you mean trainer.max_epochs?"),
    (["fit", *CONFIG, "--model.warmup_ratio", "0.1"], 2, "did you mean model.warmup_share?"),
    (["fit", *CONFIG, "--data.batch_size", "4"], 2, "a step has trainer.accumulate_grad_batches packs"),
    (["fit", "--ckpt_path", "best"], 1, "known only to the process that trained"),
    (["fit", "--ckpt_path", "saved"], 1, "--ckpt_path saved/last.ckpt"),
    (["chat", "saved"], 1, "Name one of them: saved/last.ckpt"),
    (["chat"], 1, "Usage: fastft chat CHECKPOINT|FOLDER"),
    (["fit", "--config", "top.yaml"], 2, "did you mean model?"),
    (["plan", "--config", "trainer.yaml"], 2, "did you mean trainer.max_steps?"),
    (["fit", "--config", "model.yaml"], 2, "did you mean learning_rate?"),
    (["fit", "--config", "value.yaml"], 2, "must be one of 'auto', 'bfloat16', 'float16', 'float32', got 'fp8'"),
    (["fit", "--config", "callback.yaml"], 2, "did you mean cuda_graphs?"),
]
# Configs with one mistake each.
MISTAKEN = {
    "top": "modle: 3\n"
    "model: {class_path: lightning_fastft.FineTuner, init_args: {model: x}}\n"
    "data: {class_path: lightning_fastft.PackedDataModule, init_args: {paths: y}}\n",
    "trainer": "trainer: {max_stps: 3}\n",
    "model": "model: {class_path: lightning_fastft.FineTuner, init_args: {model: x, lerning_rate: 1}}\n",
    "value": "model: {class_path: lightning_fastft.FineTuner, init_args: {model: x, dtype: fp8}}\n",
    "data": "data: {class_path: lightning_fastft.PackedDataModule, init_args: {paths: y, val_share: abc}}\n",
    "epochs": "trainer: {max_epochs: 1.5}\n",
    "bool": "trainer: {inference_mode: perhaps}\n",
    "callback": "trainer: {callbacks: [{class_path: lightning_fastft.FusedKernels, init_args: {cuda_graphz: 1}}]}\n",
    "strategy": "trainer: {strategy: {class_path: lightning_fastft.FastFTStrategy, init_args: {activation: keep}}}\n",
}
SCRIPT = f"""
import contextlib, io, json, sys
sys.argv[0] = "fastft"
from lightning_fastft.cli import main
for words in json.loads(sys.argv[1]):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([status, shown.getvalue(), sorted({HEAVY} & set(sys.modules))]))
"""


def run_python(arguments, folder):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def write_mistaken(folder):
    for name, text in MISTAKEN.items():
        (folder / f"{name}.yaml").write_text(text)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistaken")
    write_mistaken(folder)
    (folder / "tabs.yaml").write_text("trainer:\n\tmax_steps: 1\n")
    (folder / "saved").mkdir()
    for name in ("first.ckpt", "last.ckpt"):
        (folder / "saved" / name).write_text("")
    done = run_python(["-c", SCRIPT, json.dumps([words for words, _, _ in ANSWERED])], folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("number", range(len(ANSWERED)), ids=lambda number: " ".join(ANSWERED[number][0]))
def test_answer_needs_no_heavy_import(number, answers):
    status, text, loaded = answers[number]
    assert loaded == []
    assert status == ANSWERED[number][1]
    assert ANSWERED[number][2] in text
    assert "Traceback" not in text


@pytest.mark.parametrize("program", ["module", "script"])
def test_command_does_not_load_torch_with_the_package(program, tmp_path):
    # What pip writes for the entry point.
    (tmp_path / "fastft").write_text("import sys\nfrom lightning_fastft.cli import main\nsys.exit(main())\n")
    start = ["-m", "lightning_fastft"] if program == "module" else [str(tmp_path / "fastft")]
    done = run_python(["-X", "importtime", *start, "fti"], tmp_path)
    assert done.returncode == 1
    imported = set(re.findall(r"\|\s*(\w+)$", done.stderr, re.MULTILINE))
    assert "lightning_fastft" in imported
    assert not HEAVY & imported


class _Parsed(Exception):  # noqa: N818
    """Ends a command line when it has its parser."""


class _Parses(FastFTCLI):
    def parse_arguments(self, parser, args):
        raise _Parsed(parser)


def parser_of(command):
    is_run = command in TRAINER_COMMANDS
    with pytest.raises(_Parsed) as parsed:
        _Parses([command] if is_run else [], run=is_run)
    (parser,) = parsed.value.args
    return parser._subcommands_action._name_parser_map[command] if is_run else parser


@pytest.mark.parametrize("command", [*TRAINER_COMMANDS, "data"])
def test_known_options_are_those_of_the_parser(command):
    names = {name.strip("-+") for action in parser_of(command)._actions for name in action.option_strings}
    assert {name.partition(".")[0] for name in names} == set(parser_options(command))
    trained = {name.split(".")[1] for name in names if name.startswith("trainer.")} - {"help"}
    assert trained == set(read_options("lightning_fastft.cli.trainer.FastFTTrainer"))


@pytest.mark.parametrize("owner", SHORT_NAMES, ids=lambda owner: owner.__name__)
def test_every_parameter_of_a_class_is_read_from_its_source(owner):
    parser = FastFTArgumentParser()
    parser.add_class_arguments(owner, "x", fail_untyped=False, sub_configs=True)
    names = {action.dest.split(".")[1] for action in parser._actions if action.dest.startswith("x.")}
    read = read_options(f"lightning_fastft.{owner.__name__}")
    # The reader does not see that a class sets a parameter of its base itself.
    assert names <= set(read) <= names | {"needs_reference"}


@pytest.mark.covering
@pytest.mark.parametrize(
    "words",
    [
        [*OK, "--model.lr", "1"],
        [*OK, "--model.init_args.lerning_rate=1"],
        [*CONFIG, "--data.pths", "y"],
        ["--config", "dpo_qwen3_8b", "--model.bta", "1"],
        [*OK, "--trainr.max_steps", "3", "--foo", "--seed", "1"],
        [*OK, "--trainer.max_step=3"],
        [*OK, "--trainer.max_steps", "abc"],
        [*OK, "--trainer.max_epochs=1.5"],
        [*OK, "--trainer.benchmark", "perhaps"],
        [*OK, "--model.warmup_share", "abc"],
        [*OK, "--model.dtype", "fp8"],
        [*OK, "--model.quantization", "nf5"],
        [*OK, "--data.max_tokens", "1.5"],
        *(["--config", f"{name}.yaml"] for name in MISTAKEN),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["fit", "data"])
def test_mistake_is_answered_as_the_parser_answers(command, words, folder, capsys):
    write_mistaken(folder)
    answers = []
    parse = (lambda: FastFTCLI(["fit", *words])) if command == "fit" else (lambda: FastFTCLI(words, run=False))
    for answer in (lambda: check_words(command, words), parse):
        with pytest.raises(SystemExit) as stop:
            answer()
        assert stop.value.code == 2
        # The last line has the name of the program.
        answers.append(capsys.readouterr().err.splitlines()[:-1])
    assert answers[0] == answers[1]


FOREIGN = "data: {class_path: my_package.Data, init_args: {paths: nope.jsonl, pths: 1}}\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        # Hub data sets, and values that are no paths.
        ("fit", [*OK, "--data.paths", "owner/name"]),
        ("fit", [*OK, "--data.paths", "[owner/name:config:train, there.jsonl]"]),
        ("fit", [*OK, "--data.paths", "{a: 1}"]),
        ("fit", [*OK, "--data.val_paths", "null"]),
        # The last value counts.
        ("fit", [*CONFIG, "--data.paths", "nope.jsonl", "--data.paths", "there.jsonl"]),
        ("fit", [*OK, "--data.paths", "nope.jsonl", "--data.paths+", "there.jsonl"]),
        ("fit", [*CONFIG, "--data.init_args", "{paths: there.jsonl}"]),
        # Data that the command does not open.
        ("plan", CONFIG),
        ("doctor", CONFIG),
        ("validate", [*OK, "--data.paths", "nope.jsonl"]),
        ("test", CONFIG),
        ("demo", []),
        # Other classes.
        ("fit", ["--config", "foreign.yaml", "--data.pths", "1"]),
        ("fit", ["--config", "there.yaml", "--config", "foreign.yaml"]),
        ("fit", [*OK, "--data=my_package.Data", "--data.paths", "nope.jsonl"]),
        ("fit", ["--model.beta", "0.2", "--model", "PreferenceTuner", "--data.paths", "y"]),
        ("fit", [*OK, "--model", "FineTuner", "--model.anything", "1", "--allow-import", "my_package"]),
        # Options of options, and those of the commands.
        (
            "fit",
            [*OK, "--model.lora.r", "8", "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpath", "x"],
        ),
        ("fit", [*OK, "--ckpt_path", "last"]),
        ("fit", [*OK, "--ckpt_path", "null"]),
        ("demo", ["--ckpt_path", "x"]),
        ("validate", [*OK, "--verbose", "false"]),
        ("plan", [*CONFIG, "--gpu", "--odd", "--vram-gib=8"]),
        # The parser answers help before anything else.
        ("fit", ["--config", "there.yaml", "--model.lr", "1", "--help"]),
        ("fit", ["--trainer.strategy.help", "--foo"]),
        ("fit", [*CONFIG, "--print_config"]),
        ("fit", ["-cother.yaml", "--data.paths", "nope.jsonl"]),
        # What follows two dashes is no option.
        ("fit", [*OK, "--", "--foo"]),
        # Values that the parser may take.
        ("fit", [*OK, "--trainer.max_steps", "1e1", "--model.learning_rate", "1e-3", "--model.warmup_share", ".5"]),
        ("fit", [*OK, "--trainer.max_epochs", "null", "--model.learning_rate=null", "--trainer.benchmark", "True"]),
        ("fit", [*OK, "--trainer.precision", "bf16", "--trainer.devices", "auto", "--trainer.limit_val_batches", "x"]),
        # Files that only the parser can judge.
        ("fit", ["--config", "deep.yaml", "--data.paths", "nope.jsonl"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_is_not_certain_is_left_to_the_parser(command, words, folder):
    (folder / "there.jsonl").write_text("")
    (folder / "there.yaml").write_text("data: {class_path: PackedDataModule, init_args: {paths: there.jsonl}}\n")
    (folder / "foreign.yaml").write_text(FOREIGN)
    (folder / "broken.yaml").write_text("a: [")
    (folder / "deep.yaml").write_text("a: " + "[" * 200 + "]" * 200)
    check_words(command, words)


def test_last_data_of_a_config_counts(folder):
    (folder / "own.yaml").write_text(
        "data: {class_path: lightning_fastft.training.datamodule.PackedDataModule, init_args: {paths: [mine.jsonl]}}\n"
        "ckpt_path: mine.ckpt\n"
    )
    (folder / "hub.yaml").write_text("data: {class_path: PackedDataModule, init_args: {paths: owner/name}}\n")
    with pytest.raises(OptionError, match=r"mine\.ckpt"):
        check_words("fit", ["--config", "own.yaml"])
    with pytest.raises(DataError, match=r"mine\.jsonl"):
        check_words("fit", ["--config", "hub.yaml", "--config", "own.yaml", "--ckpt_path", "null"])
    assert issubclass(DataError, FastFTError)


@pytest.mark.parametrize("owner", [PackedDataModule, RolloutDataModule])
def test_data_that_a_command_opens_is_a_parameter_of_its_module(owner):
    assert set(mistakes._OPENED[owner.__name__]) <= set(read_options(f"lightning_fastft.{owner.__name__}"))
