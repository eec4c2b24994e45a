"""Configs from strangers that would write over the files of a user, run code, or never end: each is run to its end in a
home folder of its own.

Harm is: the file ``canary``, any change outside of the folder that the command runs in, a changed file of the user's in
it, a traceback, or no end.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import yaml

from tests.cli.hostile_configs import write_traps
from tests.support.sizes import sizes

pytestmark = pytest.mark.fault
# Of processor time, children included: a busy machine changes nothing. What sleeps instead is ended by the alarm, as a
# traceback.
MOST_SECONDS, ALARM_SECONDS = 20.0, 180
CALLBACKS = "lightning.pytorch.callbacks."
LOGGERS = "lightning.pytorch.loggers."
PROFILERS = "lightning.pytorch.profilers."
CODE = "import os; os.system('touch canary')\n"
# What a home folder has; WORK is the folder that the command runs in.
USERS_FILES = {
    ".bashrc": "alias ll='ls -l'\n",
    ".ssh/authorized_keys": "ssh-ed25519 AAAA me\n",
    ".config/app/config.yaml": "editor: vi\n",
    "bin/tool": "#!/bin/sh\n",
    "notes/metrics.csv": "week,kilometres\n1,12\n",
    "notes/hparams.txt": "none\n",
    "notes/run.json": "{}\n",
    "work/Makefile": "all:\n",
    "work/package.json": "{}\n",
    "work/package.html": "<p>mine</p>\n",
    "work/rows.jsonl": '{"text": "mine"}\n',
    "work/data/metrics.csv": "week,kilometres\n1,12\n",
    "work/.git/hooks/pre-commit": "#!/bin/sh\n",
}
GOOD_ROW = {"input_ids": [5, 6, 7, 8]}
BAD_ROW = {"input_ids": ["\ntouch canary\n"]}
CHAT_ROW = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
TINY = sizes(model_type="qwen3", vocab=400, width=32, inner=32, layers=1, heads=2, key_heads=2, head_width=16)


def config(*, trainer=None, data=None, model=None):
    return {
        "data": {
            "class_path": "lightning_fastft.PackedDataModule",
            "init_args": {
                "paths": [GOOD_ROW, GOOD_ROW, GOOD_ROW, BAD_ROW],
                "max_tokens": 16,
                "num_workers": 0,
                "num_proc": 1,
                "cache_dir": None,
                "max_reject_share": 0.9,
                "show_progress": False,
                **(data or {}),
            },
        },
        "model": {
            "class_path": "lightning_fastft.FineTuner",
            "init_args": {"model": TINY, "init": "random", **(model or {})},
        },
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **(trainer or {}),
        },
    }


def with_class(key, path, /, **init_args):
    entry = {"class_path": path, "init_args": init_args}
    more = {"enable_checkpointing": True} if "Checkpoint" in path else {}
    return config(trainer={key: [entry] if key in ("callbacks", "plugins") else entry, **more})


FILES_TO_HIT = (
    "HOME/.bashrc",
    "../.bashrc",
    "~/.bashrc",
    "HOME/.ssh/authorized_keys",
    "../x.jsonl",
    "sub/../../x.jsonl",
    ".git/hooks/pre-commit",
    "Makefile",
    "rows.jsonl",
    "linked.jsonl",
    "linked/x.jsonl",
    "file://HOME/x.jsonl",
    "HOME/work/../x.jsonl",
    ".hidden.jsonl",
    "data",
    "a\0b.jsonl",
    "\x1b[2J\x1b]0;owned\x07.txt",
    "HOME/bin/tool",
)
FOLDERS_TO_HIT = (
    "HOME",
    "HOME/.ssh",
    "HOME/.config/app",
    "../notes",
    "linked",
    "file://HOME/notes",
    "HOME/.bashrc",
    "HOME/.config/new",
    "~/notes",
    ".git/hooks",
    "local://HOME/notes",
    "simplecache::file://HOME/notes",
)
FOLDER_OPTIONS = {
    "default_root_dir": lambda path: config(
        trainer={"default_root_dir": path, "logger": True, "enable_checkpointing": True}
    ),
    "dirpath of ModelCheckpoint": lambda path: with_class(
        "callbacks", CALLBACKS + "ModelCheckpoint", dirpath=path, save_last=True
    ),
    "dirpath of OnExceptionCheckpoint": lambda path: with_class(
        "callbacks", CALLBACKS + "OnExceptionCheckpoint", dirpath=path
    ),
    "save_dir of CSVLogger": lambda path: with_class(
        "logger", LOGGERS + "CSVLogger", save_dir=path, name="", version=""
    ),
    "save_dir of TensorBoardLogger": lambda path: with_class(
        "logger", LOGGERS + "TensorBoardLogger", save_dir=path, name="", version=""
    ),
    "dirpath of SimpleProfiler": lambda path: with_class(
        "profiler", PROFILERS + "SimpleProfiler", dirpath=path, filename="run"
    ),
    "dirpath of AdvancedProfiler": lambda path: with_class(
        "profiler", PROFILERS + "AdvancedProfiler", dirpath=path, filename="run"
    ),
    "cache_dir": lambda path: config(data={"cache_dir": path}),
}
EVIL_PATTERNS = ("(a+)+$|(.*_proj|.*)*!", "(([a-z_0-9.])+)+!", "(.|..|...|[a-z])*!", "((.*)*)*!")
BERT = {"class_path": "torchmetrics.text.BERTScore", "init_args": {"model_name_or_path": "remote", "all_layers": True}}
INFO = {"class_path": "torchmetrics.text.InfoLM", "init_args": {"model_name_or_path": "remote"}}
LOOP = (
    "{% for a in range(90000) %}{% for b in range(90000) %}{% for c in range(90000) %}{% endfor %}{% endfor %}{% "
    "endfor %}"
)


def lora(**fields):
    return config(model={"lora": {"r": 2, **fields}})


def lora_instance(**fields):
    return config(
        model={"lora": {"class_path": "peft.LoraConfig", "init_args": {"r": 2, "target_modules": ["q_proj"], **fields}}}
    )


def chat(template, **data):
    return config(
        data={"paths": [CHAT_ROW], "tokenizer": "TOKENIZER", "chat_template": template, **data}, model={"model": TINY}
    )


def hooked(value, hook="on_train_start"):
    return with_class("callbacks", CALLBACKS + "LambdaCallback", **{hook: value})


HOSTILE = {
    **{f"rejected_path {path!r}": config(data={"rejected_path": path}) for path in FILES_TO_HIT},
    **{f"{option} {path!r}": make(path) for option, make in FOLDER_OPTIONS.items() for path in FOLDERS_TO_HIT},
    **{
        f"report {path!r}": with_class("callbacks", "lightning_fastft.RunReport", path=path, profile_step=None)
        for path in (
            "HOME/notes/run.html",
            "../notes/run.html",
            "package.html",
            "linked/run.html",
            ".git/x.html",
            "Makefile",
        )
    },
    **{
        f"logger {part} {text!r}": with_class(
            "logger", LOGGERS + "CSVLogger", **{"save_dir": ".", "name": "", "version": "", part: text}
        )
        for part in ("name", "version")
        for text in ("../notes", "HOME/notes", "linked", ".git", "data", "..", "file://HOME")
    },
    **{
        f"sub_dir {text!r}": with_class(
            "logger", LOGGERS + "TensorBoardLogger", save_dir=".", name="", version="", sub_dir=text
        )
        for text in ("../notes", "HOME/notes", ".git/hooks")
    },
    **{
        f"checkpoint name {text!r}": with_class(
            "callbacks", CALLBACKS + "ModelCheckpoint", dirpath="ckpt", filename=text
        )
        for text in ("../../notes/x", "HOME/notes/x", "../.git/hooks/x", "~/x")
    },
    **{
        f"profiler name {text!r}": with_class("profiler", PROFILERS + "SimpleProfiler", dirpath="p", filename=text)
        for text in ("../../notes/x", "HOME/notes/x", "../.git/x")
    },
    **{
        f"spike {path!r}": with_class("callbacks", CALLBACKS + "SpikeDetection", exclude_batches_path=path)
        for path in ("HOME/x.json", "package.json")
    },
    **{
        f"pattern {number} in {field}": lora(**{field: value})
        for number, text in enumerate(EVIL_PATTERNS)
        for field, value in (("target_modules", text), ("exclude_modules", text), ("rank_pattern", {text: 4}))
    },
    "pattern in modules_to_save": lora(modules_to_save=[EVIL_PATTERNS[1]], target_modules=["q_proj"]),
    "pattern in layers_pattern": lora(
        layers_pattern=EVIL_PATTERNS[1], layers_to_transform=[0], target_modules=["q_proj"]
    ),
    "pattern of an instance": lora_instance(alpha_pattern={EVIL_PATTERNS[1]: 4}),
    "pattern that is broken": lora(target_modules="(q_proj"),
    "pattern key that is broken": lora(rank_pattern={"(q_proj": 4}, target_modules=["q_proj"]),
    "pattern of a hundred thousand characters": lora(target_modules="(q|" + "k*" * 50_000 + ")"),
    "pissa without end": lora(init_lora_weights="pissa_niter_1000000000"),
    "pissa without end, of an instance": lora_instance(init_lora_weights="pissa_niter_1000000000"),
    "pissa of many digits": lora(init_lora_weights="pissa_niter_" + "9" * 5000),
    "loftq without end": lora(init_lora_weights="loftq", loftq_config={"loftq_iter": 10**9}),
    "corda from a file": lora(init_lora_weights="corda", corda_config={"cache_file": "poison.ckpt"}),
    "initialisation that is none": lora(init_lora_weights="evil"),
    "eva without data": lora(init_lora_weights="eva"),
    "megatron module": lora(megatron_config={"a": 1}, megatron_core="hostile"),
    "megatron module, of an instance": lora_instance(megatron_config={"a": 1}, megatron_core="hostile"),
    "auto mapping": lora(auto_mapping={"base_model_class": "Model", "parent_library": "hostile"}),
    "layers replicated without end": lora(layer_replication=[[0, 10**9]]),
    "layers that are no pairs": lora(layer_replication=[1, 2]),
    "rank of an instance": lora_instance(r=2**40),
    "rank pattern that is huge": lora(rank_pattern={"q_proj": 2**40}),
    "tokens beyond the vocabulary": lora(trainable_token_indices=[10**12]),
    "targets of another type": lora(target_modules={"a": {"b": 1}}),
    "hook BERTScore": hooked(BERT),
    "hook InfoLM": hooked(INFO),
    "hook module of a model": hooked({"class_path": "peft.PeftModel", "init_args": {}}),
    "hook layer": hooked(
        {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1, "out_features": 1}}, "setup"
    ),
    "hook by its module": with_class("callbacks", CALLBACKS + "lambda_function.LambdaCallback", setup=BERT),
    "function of ThroughputMonitor": with_class("callbacks", CALLBACKS + "ThroughputMonitor", batch_size_fn=BERT),
    "function of BackboneFinetuning": with_class("callbacks", CALLBACKS + "BackboneFinetuning", lambda_func=INFO),
    "function of StochasticWeightAveraging": with_class(
        "callbacks", CALLBACKS + "StochasticWeightAveraging", swa_lrs=0.1, avg_fn=BERT
    ),
    "function of ModelPruning": with_class("callbacks", CALLBACKS + "ModelPruning", pruning_fn=BERT),
    "hook of communication": config(
        trainer={
            "strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy", "init_args": {"ddp_comm_hook": BERT}}
        }
    ),
    "metric as scheduler": config(model={"scheduler": BERT}),
    "metric of images": hooked(
        {"class_path": "torchmetrics.image.fid.FrechetInceptionDistance", "init_args": {"feature": "remote"}}
    ),
    "pickles of MNIST": {
        **config(),
        "data": {
            "class_path": "lightning.pytorch.demos.mnist_datamodule.MNISTDataModule",
            "init_args": {"data_dir": "."},
        },
    },
    "adapters of another kind": config(model={"lora": {"class_path": "peft.PrefixTuningConfig", "init_args": {}}}),
    "template: nested loops": chat(LOOP),
    "template: nested loops in two processes": chat(LOOP, num_proc=2, paths=[CHAT_ROW] * 4),
    "template: nested loops under generation": chat("{% generation %}" + LOOP + "{% endgeneration %}"),
    "template: macros that double": chat(
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "template: powers": chat("{{ 7 ** 7 ** 9 }}"),
    "template: broken": chat("{% for %}"),
    "template: reaches for the interpreter": chat("{{ cycler.__init__.__globals__.os.system('touch canary') }}"),
    "template: a file that is none": chat("none\x1b[2J.jsonl.jinja"),
    "template: recursion": chat("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"),
    "model: adapters beside a configuration": config(model={"model": "adapted", "init": "pretrained"}),
    "model: broken folder": config(model={"model": "data", "init": "pretrained"}),
    "model: terminal codes": config(model={"model": "\x1b[2J\x1b[31mowned", "init": "pretrained"}),
    "tokenizer: of another shape": config(data={"paths": [CHAT_ROW], "tokenizer": "shape"}),
    "tokenizer: not JSON": config(data={"paths": [CHAT_ROW], "tokenizer": "notjson"}),
    "tokenizer: unknown class": config(data={"paths": [CHAT_ROW], "tokenizer": "noclass"}),
    "tokenizer: settings that are a list": config(data={"paths": [CHAT_ROW], "tokenizer": "listed"}),
    "tokenizer: no folder": config(data={"paths": [CHAT_ROW], "tokenizer": "nowhere"}),
    "terminal codes in an option": config(trainer={"precision": "\x1b[2J\x1b]52;c;b3duZWQ=\x07"}),
    "terminal codes in a class": config(trainer={"callbacks": [{"class_path": "\x1b[2Jx.Y"}]}),
    "terminal codes in a name": {**config(), "\x1b[2Jx": 1},
}


def write_home(home):
    """Lay out a home folder with the user's files, links, traps and hostile folders; return the folder to run in."""
    for name, content in USERS_FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(content)
    work = home / "work"
    (work / "linked").symlink_to(home / "notes")
    (work / "linked.jsonl").symlink_to(home / ".bashrc")
    write_traps(work)
    for name in ("adapted", "shape", "notjson", "noclass", "listed"):
        (work / name).mkdir()
        (work / name / "config.json").write_text(json.dumps(TINY))
        (work / name / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (work / "adapted/adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "remote"})
    )
    (work / "shape/tokenizer.json").write_text('{"model": {"type": "EVIL"}}')
    (work / "notjson/tokenizer.json").write_text("{")
    (work / "noclass/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "os.system"}))
    (work / "listed/tokenizer_config.json").write_text("[1]")
    return work


def snapshot(home):
    """Return the content of every file that no config may touch."""
    work, found = home / "work", {}
    for path in sorted(home.rglob("*")):
        is_users = not path.is_relative_to(work) or str(path.relative_to(home)) in USERS_FILES or ".git" in path.parts
        if is_users and path != work:
            found[str(path.relative_to(home))] = path.read_bytes() if path.is_file() else b""
    return found


def filled(content, *, home, tokenizer):
    if isinstance(content, dict):
        return {key: filled(value, home=home, tokenizer=tokenizer) for key, value in content.items()}
    if isinstance(content, list):
        return [filled(value, home=home, tokenizer=tokenizer) for value in content]
    return (
        content.replace("HOME", str(home)).replace("TOKENIZER", str(tokenizer)) if isinstance(content, str) else content
    )


def run_all(base, names):
    """Run every config in a home of its own and write down what became of it."""
    import contextlib
    import io

    from lightning_fastft.cli import main

    found, path = {}, [*sys.path]
    for number, name in enumerate(names):
        home = base / f"home{number}"
        work = write_home(home)
        os.chdir(work)
        os.environ["HOME"] = str(home)
        sys.path[:] = [*path, str(work)]
        Path("attack.yaml").write_text(yaml.safe_dump(filled(HOSTILE[name], home=home, tokenizer=base / "tokenizer")))
        before, told, begin = snapshot(home), io.StringIO(), sum(os.times()[:4])
        signal.alarm(ALARM_SECONDS)
        try:
            with contextlib.redirect_stderr(told), contextlib.redirect_stdout(told):
                end = f"exit {main(['fit', '--config', 'attack.yaml'])}"
        except SystemExit as stop:
            end = f"exit {stop.code}"
        except BaseException as error:  # noqa: BLE001 - what a user would see as a traceback
            end = (
                f"traceback {type(error).__name__}: {str(error)[:300]} "
                f"{''.join(traceback.format_tb(error.__traceback__)[-2:])}"
            )
        signal.alarm(0)
        after = snapshot(home)
        found[name] = {
            "end": end,
            "seconds": sum(os.times()[:4]) - begin,
            "canary": (work / "canary").exists() or "hostile" in sys.modules,
            "touched": sorted(key for key in {*before, *after} if before.get(key) != after.get(key)),
            "steers": "\x1b" in told.getvalue(),
            "told": told.getvalue()[-400:],
        }
        sys.modules.pop("hostile", None)
        os.chdir(base)
        shutil.rmtree(home)
        (base / "found.json").write_text(json.dumps(found))


def run_child(base, names):
    from tests.packing.conftest import UNMARKED, build_tokenizer

    build_tokenizer(chat_template=UNMARKED).save_pretrained(base / "tokenizer")
    (base / "names.json").write_text(json.dumps(list(names)))
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.test_hostile_configs", str(base)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((base / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_child(tmp_path_factory.mktemp("configs"), HOSTILE)


def harm_of(entry):
    """Return what a config did that none may do."""
    harms = {
        "code": entry["canary"],
        "files": entry["touched"],
        "traceback": entry["end"].startswith("traceback"),
        "terminal": entry["steers"],
    }
    return {name: harm for name, harm in harms.items() if harm} | (
        {"time": entry["seconds"]} if entry["seconds"] > MOST_SECONDS else {}
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_config_does_no_harm(found, name):
    assert not harm_of(found[name]), (found[name]["end"], found[name]["told"])


def test_there_are_a_hundred_and_the_figure_is_printed(found):
    num_bad = sum(bool(harm_of(entry)) for entry in found.values()) + len(HOSTILE) - len(found)
    print(
        f"R18: {num_bad} of {len(HOSTILE)} hostile configs ran code, wrote outside of the run's folder, ended in a "
        "traceback, or did not end"
    )
    assert len(HOSTILE) >= 100
    assert num_bad == 0


if __name__ == "__main__":
    place = Path(sys.argv[1])
    run_all(place, json.loads((place / "names.json").read_text()))
