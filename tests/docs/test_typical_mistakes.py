"""The table of typical mistakes in docs/troubleshooting.md: each line is typed, and answered as it says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fastft.demo.files import write_demo_files
from lightning_fastft.demo.generator import generate_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
SECTION = re.search(r"^## Typical mistakes.*?(?=^## |\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)[0]
MISTAKES = re.findall(r"^\| `([^`]+)` \| (.+) \|$", SECTION, flags=re.MULTILINE)
CONFIG = """
model: {class_path: lightning_fastft.FineTuner, init_args: {model: model, init: random}}
data:
  class_path: lightning_fastft.PackedDataModule
  init_args: {paths: train.jsonl, max_tokens: 512, num_proc: 1, cache_dir: null}
trainer: {accelerator: cpu, strategy: fastft, max_steps: 1, logger: false, enable_checkpointing: false,
          enable_progress_bar: false}
"""
# Modules that are imported on first use: PEFT, transformers' model classes.
FIRST_USES = ("--model.lora.", "--ckpt_path run.yaml")


# In a process of its own, as for a user: short names of classes that other tests have imported are found by the parser.
SCRIPT = """
import contextlib, io, json, shlex, sys, time
from lightning_fastft.cli import main

lines, answers = json.load(sys.stdin), []
for line in lines:
    said, begin = io.StringIO(), time.process_time()
    with contextlib.redirect_stderr(said):
        try:
            status = main(shlex.split(line))
        except SystemExit as stop:
            status = stop.code
    answers.append((status, time.process_time() - begin, said.getvalue()))
with open("answers.json", "w") as file:
    json.dump(answers, file)
"""
TIMEOUT_S = 300


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def working_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("typical")
    write_demo_files(generate_rows(num_train=40, num_validation=4), folder, vocab_size=320)
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "broken.yaml").write_text("trainer: [\n")
    (folder / "foreign.yaml").write_text("model: {class_path: my_package.Model}\n")
    (folder / "tabs.yaml").write_text("trainer:\n\tmax_steps: 1\n")
    (folder / "short.yaml").write_text(CONFIG.replace("max_steps: 1", "max_steps: 1, callbacks: [FusedKernels]"))
    (folder / "saved").mkdir()
    (folder / "saved/last.ckpt").write_text("")
    write_mistaken_configs(folder)
    write_mistaken_data(folder)
    (folder / "half.ckpt").write_bytes(bytes(100))
    (folder / "void").mkdir()
    (folder / "empty.jsonl").write_text("")
    (folder / "data.zip").write_text("x")
    (folder / "bad.jsonl").write_text('{"text": }\n')
    write_rows(folder / "odd.jsonl", {"question": "a", "answer": "b"})
    write_rows(folder / "long.jsonl", {"text": "word " * 500})
    write_rows(folder / "pair.jsonl", {"prompt": "a", "chosen": "b", "rejected": "c"})
    write_rows(folder / "text.jsonl", {"messages": json.dumps([{"role": "user", "content": "a"}])})
    return folder


def write_mistaken_configs(folder):
    for name, old, new in (
        ("misspelt", "FineTuner", "FineTunr"),
        ("nameless", "class_path: lightning_fastft.FineTuner", "class: lightning_fastft.FineTuner"),
        ("twice", "trainer: {", "trainer: {max_steps: 2}\ntrainer: {"),
        ("level", "model: {class", "fit:\n  model: {class"),
        ("callbacks", "max_steps: 1", "max_steps: 1, callbacks: {ModelCheckpoint: {dirpath: x}}"),
    ):
        assert old in CONFIG
        (folder / f"{name}.yaml").write_text(CONFIG.replace(old, new, 1))
    (folder / "void.yaml").write_text("")
    (folder / "list.yaml").write_text("- a\n")
    (folder / "binary.yaml").write_bytes(b"\xff\x00")


def write_mistaken_data(folder):
    (folder / "latin.jsonl").write_bytes('{"text": "caf\u00e9"}\n'.encode("latin-1"))
    (folder / "utf16.jsonl").write_bytes('{"text": "a"}\n'.encode("utf-16"))
    (folder / "broken.parquet").write_bytes(b"PAR1xxxx")
    (folder / "open.csv").write_text('prompt,completion\n"a,b\n')
    (folder / "plain.jsonl.gz").write_text('{"text": "a"}\n')
    turns = [{"role": "humn", "content": "a"}, {"role": "assistant", "content": "b"}]
    write_rows(folder / "roles.jsonl", {"messages": turns})


def test_table_has_many_lines():
    assert len(MISTAKES) >= 120
    assert len({words for words, _ in MISTAKES}) == len(MISTAKES)


@pytest.mark.fault
def test_each_mistake_is_answered_as_the_page_says(working_folder):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([line for line, _ in MISTAKES]),
        cwd=working_folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers = json.loads((working_folder / "answers.json").read_text())
    wrong = []
    for number, ((line, expected), (status, taken_s, said)) in enumerate(zip(MISTAKES, answers, strict=True)):
        is_quick = taken_s <= 1 or number < 4 or any(part in line for part in FIRST_USES)
        if not status or expected not in said or "Traceback" in said or not is_quick:
            wrong.append((line, status, round(taken_s, 1), said[-300:]))
    assert wrong == []
