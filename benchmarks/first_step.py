r"""Time to the first step: from the start of a process to the end of step 1, and to the steady step time.

    python -m benchmarks.first_step --workload qwen3-0.6b-lora --systems ours unsloth --root /dev/shm/fastft --out
    runs/first python -m benchmarks.first_step --workload tiny --device cpu --systems ours plain --root /tmp/fastft
    --out runs/first

Each system starts in a fresh process, first with empty caches ("cold": those of Triton, Inductor, tokens and data sets,
and files in the current folder), then again with the caches of the first start ("warm"). The
files of the model are in the page cache; compile the installed modules before (python -m compileall), as pip does. All
systems read the same model folder and the same file of texts: GSM8K with the tokenizer of GPT-2 where the data folder
and the vocabulary allow it, else made-up words. Ours trains by the shipped config of the workload, the others by their
documentation (benchmarks/first_step_arms.py).

Times are those of the parent's clock: "imports" (modules imported; ours: objects made), "loaded" (model on its device),
"tokenised" (texts tokenised and packed), "prepared" (the first step begins), "first step" (its end, after a
synchronisation), and "steady": the end of the first step from which the median of five is within 5 % of the steady
step time, which is the median of the last five steps. Ours also logs its phases; compiled Triton kernels are counted.
``--profile`` writes cProfile's table of a further warm start, whose times are not used.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.first_step_arms import SYSTEMS

# Set before anything is imported, so that no system uses the network.
for _name, _value in (
    ("HF_HUB_OFFLINE", "1"),
    ("TRANSFORMERS_OFFLINE", "1"),
    ("UNSLOTH_DISABLE_STATISTICS", "1"),
):
    os.environ.setdefault(_name, _value)

STARTS = ("cold", "warm")
MARKS = ("imports", "loaded", "tokenised", "prepared", "first_step", "steady")
WINDOW = 5
TOLERANCE = 0.05
DATA = Path(__file__).parents[2] / "shared" / "data"
# Variables of a developer's shell that a user's process does not have: compiled modules are kept, and tokenizers choose
# their threads.
_DROPPED = ("PYTHONDONTWRITEBYTECODE", "TOKENIZERS_PARALLELISM")
# Variables with the folders of caches.
_CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "HF_DATASETS_CACHE")
_BPE_WORDS = 50_257


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every start, write raw.jsonl, rows.csv and table.txt, and return 1 if a start failed."""
    from benchmarks.results import append_rows
    from benchmarks.ruler.building import build
    from benchmarks.ruler.cases import base_dtype
    from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

    options = _parser().parse_args(arguments)
    deadline = time.monotonic() + options.budget_s
    workload, is_cuda = WORKLOADS[options.workload], options.device == "cuda"
    options.max_tokens = options.max_tokens or workload.max_tokens
    build(workload, root=options.root, device=options.device, dtype=base_dtype(is_cuda=is_cuda))
    options.out.mkdir(parents=True, exist_ok=True)
    files = WorkloadFiles(options.root, workload)
    texts = make_inputs(files, data=options.data, folder=(options.root / "first_step" / workload.name).resolve())
    records = []
    # Cold starts of all systems come first, so that a short budget still gives complete comparisons.
    for start in (*STARTS, *(["profile"] if options.profile else [])):
        for system in options.systems if start != "profile" else ["ours"]:
            record = run_start(system, start, options, texts=texts, seconds=deadline - time.monotonic())
            records.append(record)
            with (options.out / "raw.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
            print(_render(record), flush=True)
    records = [record for record in records if record["start"] in STARTS]
    append_rows(result_rows(records, command=_command(arguments)), path=options.out / "rows.csv")
    table = render_table(records)
    (options.out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    return int(any(record["reason"] for record in records))


def _command(arguments: Sequence[str] | None) -> str:
    return "python -m benchmarks.first_step " + " ".join(sys.argv[1:] if arguments is None else arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--systems", nargs="+", default=["ours", "unsloth"], choices=SYSTEMS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--root", type=Path, required=True, help="folder of the built workloads")
    parser.add_argument("--out", type=Path, required=True, help="folder for raw.jsonl, logs, rows.csv and table.txt")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with gsm8k and gpt2_bpe")
    parser.add_argument("--max-tokens", type=int, help="tokens of a pack; default: that of the workload")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--start-s", type=float, default=240.0, help="limit of a start")
    parser.add_argument("--budget-s", type=float, default=3600.0)
    parser.add_argument("--profile", action="store_true", help="profile one more warm start of ours")
    return parser


def make_inputs(files: Any, *, data: Path, folder: Path) -> Path:
    """Write a model folder with a tokenizer for the texts, and the texts; return the file of texts.

    The weights are links to those of the workload.
    """
    model = folder / "model"
    shutil.rmtree(folder, ignore_errors=True)
    model.mkdir(parents=True)
    is_real = (data / "gsm8k").is_dir() and files.workload.model_config["vocab_size"] > _BPE_WORDS
    for path in files.model.iterdir():
        if not (is_real and "token" in path.name):
            (model / path.name).symlink_to(path.resolve())
    if is_real:
        _write_bpe(model, data=data / "gpt2_bpe")
        rows = [json.loads(line) for line in (data / "gsm8k" / "train.jsonl").read_text("utf-8").splitlines()]
        texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    else:
        draw, highest = random.Random(0), min(files.workload.model_config["vocab_size"], 8000)
        texts = [" ".join(f"w{draw.randrange(4, highest)}" for _ in range(draw.randint(20, 120))) for _ in range(2000)]
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def _write_bpe(folder: Path, *, data: Path) -> None:
    """Write the byte-level BPE of GPT-2 as a fast tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE.from_file(str(data / "vocab.json"), str(data / "merges.txt")))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=end, eos_token=end, unk_token=end, pad_token="<|pad|>", model_max_length=32_768
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def run_start(system: str, start: str, options: argparse.Namespace, *, texts: Path, seconds: float) -> dict[str, Any]:
    """Start one system in a fresh process and return its record; without times it has a "reason"."""
    from benchmarks.ruler.driver import end_session, environment_of

    record: dict[str, Any] = {"workload": options.workload, "system": system, "start": start, "reason": ""}
    if seconds < 10.0:
        return {**record, "reason": "not started: the budget is used up"}
    caches, name = options.out.resolve() / f"caches_{system}", f"{system}_{start}"
    if start == "cold":
        shutil.rmtree(caches, ignore_errors=True)
        caches.mkdir()
    record_path = options.out.resolve() / f"{name}.json"
    record_path.unlink(missing_ok=True)
    environment = environment_of(system, device=options.device, folder=options.out / "flash_attn")
    environment = {variable: value for variable, value in environment.items() if variable not in _DROPPED}
    environment |= {variable: str(caches / variable.lower()) for variable in _CACHES}
    # A peer writes compiled code to the current folder.
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")])
    )
    words = {
        "--workload": options.workload, "--system": system, "--device": options.device, "--record": record_path,
        "--root": options.root.resolve(), "--model": texts.parent / "model", "--texts": texts,
        "--max-tokens": options.max_tokens, "--steps": options.steps,
        **({"--profile": options.out.resolve() / f"{name}.txt"} if start == "profile" else {}),
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "benchmarks.first_step_arms",
        *(str(word) for pair in words.items() for word in pair),
    ]
    with (options.out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--start", repr(time.monotonic())],
            stdout=log, stderr=subprocess.STDOUT, cwd=caches, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout=min(seconds, options.start_s))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(process)
    if code != 0:
        lines = (options.out / f"{name}.log").read_text("utf-8", errors="replace").strip().splitlines() or [""]
        reason = "stopped at its time limit" if code is None else f"exit code {code}: {lines[-1][:300]}"
        return {**record, "reason": reason}
    record |= json.loads(record_path.read_text(encoding="utf-8"))
    steady_s, place = find_steady(record["step_ends"])
    record["steady_step_s"], record["num_to_steady"] = steady_s, place + 1
    record["marks"]["steady"] = record["step_ends"][place]
    return record


def find_steady(step_ends: Sequence[float]) -> tuple[float, int]:
    """Return the steady step time, and the number, from 0, of the first step from which steps take that time.

    Args:
        step_ends: End of each step in seconds.

    Returns:
        The median of the last five steps; the first step whose five successors have a median within 5 % of it.

    Example:
        >>> find_steady([9.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0])
        (1.0, 0)
        >>> find_steady([0.0, 3.0, 6.0, 9.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0])
        (1.0, 2)
    """
    seconds = [after - before for before, after in pairwise(step_ends)]
    steady = statistics.median(seconds[-WINDOW:])
    for place in range(len(seconds)):
        if abs(statistics.median(seconds[place : place + WINDOW]) - steady) <= TOLERANCE * steady:
            return steady, place
    return steady, len(seconds)


def result_rows(records: Sequence[dict[str, Any]], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv, without those of failed starts."""
    from benchmarks.ruler.report import version_text

    rows = []
    for record in records:
        if record["reason"]:
            continue
        shared = {
            "benchmark": "first_step",
            "workload": record["workload"],
            "system": f"{record['system']}, {record['start']} caches",
            "version": version_text(record),
            "n": 1,
            "command": command,
            "device": record["versions"].get("device", "cpu"),
        }
        marks = record["marks"]
        rows += [
            {**shared, "metric": f"time to {name.replace('_', ' ')}", "value": marks[name], "unit": "s"}
            for name in MARKS
        ]
        rows += [
            {**shared, "metric": "steady step", "value": record["steady_step_s"] * 1e3, "unit": "ms", "n": WINDOW},
            {**shared, "metric": "steps to the steady time", "value": record["num_to_steady"], "unit": "steps"},
        ]
        if "num_compiled" in record:
            rows += [
                {**shared, "metric": "Triton kernels compiled", "value": record["num_compiled"], "unit": "kernels"},
                {**shared, "metric": "time of their compilation", "value": record["compile_s"], "unit": "s"},
            ]
    return rows


def render_table(records: Sequence[dict[str, Any]]) -> str:
    """Return one line per start, and the ratios of ours to each other system."""
    lines = [_render(record) for record in records]
    done = {(record["system"], record["start"]): record["marks"] for record in records if not record["reason"]}
    for (system, start), marks in done.items():
        ours = done.get(("ours", start))
        if system != "ours" and ours is not None:
            ratios = ", ".join(f"{name.replace('_', ' ')} {ours[name] / marks[name]:.2f}" for name in MARKS[-2:])
            lines.append(f"ours / {system}, {start}: {ratios}")
    return "\n".join(lines)


def _render(record: dict[str, Any]) -> str:
    title = f"{record['workload']} {record['system']:8}{record['start']:5}"
    if record["reason"]:
        return f"{title} no times: {record['reason']}"
    times = "  ".join(f"{name.replace('_', ' ')} {record['marks'][name]:.1f}" for name in MARKS)
    compiled = (
        f"; Triton: {record['num_compiled']} compiled in {record['compile_s']:.1f} s, {record['num_found']} found"
        if "num_compiled" in record
        else ""
    )
    return (
        f"{title} {times} s (step {record['num_to_steady']}; {record['steady_step_s'] * 1e3:.0f} ms a step){compiled}"
    )


if __name__ == "__main__":
    sys.exit(main())
