r"""Measure tokens/s of DDP, FSDP2, context and expert parallelism, and a model built sharded.

    python -m benchmarks.multi_gpu multi --out runs/multi
    python -m benchmarks.multi_gpu multi --out runs/context --runs one context --tokens 131072 --one-document
    python -m benchmarks.multi_gpu multi --out runs/resident --runs fsdp --mode keep+resident --adapters shard
    python -m benchmarks.multi_gpu multi --out runs/70b --runs fsdp --ranks 4 --workload llama-3.3-70b-lora \
        --mode auto:8+fused+fp8
    python -m benchmarks.multi_gpu multi --out runs/120b --runs experts --ranks 4 --workload gpt-oss-120b-lora \
        --mode auto:16+fused
    python -m benchmarks.multi_gpu full32b --out runs/full32b --ranks 4
    python -m benchmarks.multi_gpu experts --out runs/experts --ranks 2
    python -m benchmarks.multi_gpu multi --out runs/four --ranks 4
    python -m benchmarks.multi_gpu multi --out runs/peers --ranks 4 --root /dev/shm/fastft --mode keep+fused \
        --runs fsdp ddp transformers-fsdp:recompute transformers-fsdp:keep+liger+resident unsloth-ddp:off

"multi" trains Qwen3-8B LoRA in bf16 on 2 or more GPUs: DDP and FSDP2 with 8,192 tokens per GPU, "context" with a pack
of this many tokens on all, "experts" with experts owned in shares. "full32b" trains all weights of Qwen3-32B in bf16;
the model is built sharded, so no rank ever holds it whole. The command "experts" trains all weights of 12 layers of
Qwen3-30B-A3B, with expert weights gathered in each layer (fsdp) and with experts owned in shares (experts); the losses
of both must agree to 1e-3.

Peers (SYSTEM-STRATEGY:MODE; benchmarks/multi_gpu_peers.py) take the same steps: same packs per rank, adapters,
optimizer and clipping. With --root, ours and the peers read weights and adapters that ``benchmarks.train_step build``
wrote there; losses must agree.

Without it weights are random and the same in every run (one seed). N GPUs and one GPU with an accumulation of N (under
"context" one GPU without) take the same steps: their losses must agree to 1e-3. The first steps (8;
--warmup) repeat the same packs of the ruler, so that losses fall if the steps train; timed steps follow, and each has
new packs. The packs of a step have similar attention cost, as PackedDataModule gives them to ranks. Time between the
ends of steps by CUDA events on rank 0, clipping and fused AdamW included. Records are flushed run by run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmarks import multi_gpu_ranks
from benchmarks.multi_gpu_peers import PEERS, parse_peer
from benchmarks.multi_gpu_steps import CONTEXT, EXPERTS
from benchmarks.multi_gpu_tables import expert_table, full_table, multi_table, result_rows, short
from benchmarks.results import append_rows
from benchmarks.ruler.cases import CaseLog
from benchmarks.ruler.driver import environment_of
from benchmarks.ruler.plans import least_warmup
from benchmarks.ruler.report import read_records
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles

RUNS = ("one", "accumulate", "ddp", "fsdp")
# Timed steps of the run with accumulation, of which only the losses are used.
NUM_ACCUMULATED = 1
LEAST_SECONDS = 30.0
# Seconds for torchrun to end its ranks, which are not in its process group.
END_SECONDS = 45.0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # The first steps of auto do not follow its plan.
    options.warmup = max(options.warmup, least_warmup(options.mode))
    if options.command == "worker":
        code = multi_gpu_ranks.run(options)
        if options.device == "cpu":
            # With a gloo group torch (2.13) now and then aborts when the program ends, after everything is written.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    driver = Driver(options)
    {"multi": multi, "full32b": full, EXPERTS: experts}[options.command](driver, options)
    # The latest record of every run.
    records = list({record["title"]: record for record in read_records(options.out / "raw.jsonl")}.values())
    table = {"multi": multi_table, "full32b": full_table, EXPERTS: expert_table}[options.command](records)
    (options.out / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(table, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, required=True)
    shared.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    shared.add_argument("--tokens", type=int, default=8192, help="tokens of a pack")
    shared.add_argument("--one-document", action="store_true", help="packs of one document each")
    shared.add_argument("--mode", default="offload", help="mode for activations, as in the ruler")
    shared.add_argument("--steps", type=int, default=30)
    shared.add_argument("--warmup", type=int, default=8, help="steps before the timed ones, all on the same packs")
    shared.add_argument("--budget-s", type=float, default=3600.0)
    shared.add_argument("--arm-s", type=float, default=3600.0, help="limit of one run")
    shared.add_argument(
        "--adapters",
        default="auto",
        choices=("auto", "replicate", "shard"),
        help="placement of LoRA adapters under FSDP2",
    )
    one = commands.add_parser("multi", parents=[shared], help="one GPU, DDP and FSDP2")
    one.add_argument("--workload", default="qwen3-8b-lora")
    one.add_argument("--ranks", type=int, default=2)
    one.add_argument(
        "--runs", nargs="+", default=list(RUNS), type=_run_name,
        help=f"in this order: {', '.join((*RUNS, CONTEXT, EXPERTS))}, or a peer SYSTEM-STRATEGY[:MODE]: {', '.join(PEERS)}",
    )  # fmt: skip
    two = commands.add_parser("full32b", parents=[shared], help="every weight of a large model")
    two.add_argument(
        "--workload", default="qwen3-32b-qlora", help="workload whose model is trained, in bf16 and without adapters"
    )
    two.add_argument("--ranks", type=int, default=4)
    two.add_argument("--master-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    two.add_argument("--optim-bits", type=int, default=32, choices=(8, 32), help="bits of the moments")
    owners = commands.add_parser(EXPERTS, parents=[shared], help="every weight of a mixture of experts")
    owners.add_argument("--workload", default="qwen3-30b-a3b-12l-lora", help="workload whose model is trained")
    owners.add_argument("--ranks", type=int, default=2)
    owners.add_argument("--master-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    owners.add_argument("--optim-bits", type=int, default=32, choices=(8, 32), help="bits of the moments")
    owners.add_argument("--runs", nargs="+", default=["fsdp", EXPERTS], choices=("fsdp", EXPERTS))
    owners.add_argument("--expert-parallel", type=int, help="ranks that share one set of experts (all)")
    three = commands.add_parser("worker", parents=[shared], help="one rank of a run")
    three.add_argument("--workload", required=True)
    three.add_argument("--strategy", required=True, choices=tuple(multi_gpu_ranks.STRATEGIES))
    three.add_argument("--accumulate", type=int, default=1)
    three.add_argument("--full", action="store_true")
    three.add_argument("--master-dtype", default="auto")
    three.add_argument("--optim-bits", type=int, default=32)
    three.add_argument("--expert-parallel", type=int)
    three.add_argument("--title", required=True)
    for command in (one, three):
        command.add_argument("--root", type=Path, help="folder of the built workload; without it weights are random")
    return parser


def _run_name(text: str) -> str:
    """Return the name of a run of "multi", if there is one."""
    if text in (*RUNS, CONTEXT, EXPERTS):
        return text
    try:
        parse_peer(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


class Driver:
    """Start runs one after the other, each in its own processes, within the budget.

    Args:
        options: Options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._raw: Path = options.out / "raw.jsonl"
        self._deadline = time.monotonic() + options.budget_s
        self._command = "python -m benchmarks.multi_gpu " + " ".join(sys.argv[1:])

    def run(self, title: str, *, strategy: str, num_ranks: int, num_steps: int, arguments: Sequence[str] = ()) -> None:
        """Run one of our strategies on some ranks and write a record, also if it fails; skip runs of earlier calls."""
        options = self._options
        words = [
            "benchmarks.multi_gpu", "worker", "--title", title, "--strategy", strategy, "--out", str(options.out),
            "--device", options.device, "--tokens", str(options.tokens), "--mode", options.mode,
            "--steps", str(num_steps), "--warmup", str(options.warmup), "--workload", options.workload,
            "--adapters", options.adapters, *(["--one-document"] if options.one_document else []),
            *(["--root", str(options.root)] if getattr(options, "root", None) else []), *arguments,
        ]  # fmt: skip
        self._start(title, words, num_ranks=num_ranks, environment=dict(os.environ))

    def run_peer(self, text: str) -> None:
        """Run a peer on all ranks; skip runs of earlier calls."""
        options, (strategy, mode) = self._options, parse_peer(text)
        title = f"{strategy}:{mode} x{options.ranks}"
        given = {
            "title": title, "strategy": strategy, "mode": mode, "out": str(options.out), "device": options.device,
            "tokens": options.tokens, "steps": options.steps, "warmup": options.warmup, "workload": options.workload,
            "one_document": options.one_document, "root": str(options.root), "accumulate": 1, "optim_bits": 32,
            "adapters": "",
        }  # fmt: skip
        environment = environment_of(strategy, device=options.device, folder=options.out / "flash_attn")
        words = ["benchmarks.multi_gpu_peers", json.dumps(given)]
        self._start(title, words, num_ranks=options.ranks, environment=environment)

    def _start(self, title: str, words: Sequence[str], *, num_ranks: int, environment: dict[str, str]) -> None:
        """Run a module on some ranks, and append the rows of its record."""
        if any(record["title"] == title and not record["reason"] for record in read_records(self._raw)):
            return
        left = self._deadline - time.monotonic()
        num_before = len(read_records(self._raw))
        reason = f"not started: {left:.0f} s of the budget left" if left < LEAST_SECONDS else ""
        if not reason:
            launch = (
                ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
                if num_ranks > 1
                else []
            )
            reason = run_command(
                [sys.executable, *launch, "-m", *words],
                log=self._options.out / "log.txt",
                seconds=min(left, self._options.arm_s),
                environment=environment,
            )
        records = read_records(self._raw)[num_before:]
        if not records:
            records = [{"title": title, "reason": reason or "its processes left no record"}]
            CaseLog(self._raw).write(records[0])
        append_rows(
            [row for record in records for row in result_rows(record, command=self._command)],
            path=self._options.out / "rows.csv",
        )
        print(f"run: {title}: {records[-1]['reason'] or short(records[-1])}", flush=True)


def run_command(command: Sequence[str], *, log: Path, seconds: float, environment: dict[str, str]) -> str:
    """Run a command and its children; return the error, empty if there is none."""
    with log.open("ab") as sink:
        sink.write(f"\n===== {' '.join(command)} =====\n".encode())
        sink.flush()
        begin = sink.tell()
        # Only strategies of several devices would set a seed again that Lightning left in the environment.
        environment = {name: value for name, value in environment.items() if not name.startswith("PL_")}
        process = subprocess.Popen(
            command, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            _end(process)
    output = log.read_bytes()[begin:].decode(errors="replace").splitlines()
    # torchrun's own report of a failed rank comes last.
    lines = [line for line in output if "Error" in line and "ChildFailedError" not in line]
    return "" if code == 0 else f"ended with code {code}: {lines[-1][:300] if lines else ''}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children, also if the process itself has ended."""
    if process.poll() is None:
        # torchrun starts each rank in its own session, and ends it on SIGTERM.
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def multi(driver: Driver, options: argparse.Namespace) -> None:
    """Run one GPU, one GPU with accumulation, DDP, FSDP2, context and expert parallel, and peers.

    Raises:
        ValueError: Peers are requested, and their weights are not built.
    """
    if any(name.partition(":")[0] in PEERS for name in options.runs) and not _is_built(options):
        raise ValueError(
            f"Peers read weights from files: run `python -m benchmarks.train_step build --workload {options.workload} "
            "--root ROOT` first and give --root ROOT."
        )
    for name in options.runs:
        run = {"num_ranks": options.ranks, "num_steps": options.steps}
        if name == "one":
            driver.run("one GPU", strategy="one", **{**run, "num_ranks": 1})
        elif name == "accumulate":
            driver.run(
                f"one GPU, accumulation {options.ranks}",
                strategy="one",
                num_ranks=1,
                num_steps=NUM_ACCUMULATED,
                arguments=["--accumulate", str(options.ranks)],
            )
        elif name.partition(":")[0] in PEERS:
            driver.run_peer(name)
        else:
            is_cut = name == "fsdp" and options.adapters == "shard"
            driver.run(f"{name} x{options.ranks}{', adapters sharded' if is_cut else ''}", strategy=name, **run)


def _is_built(options: argparse.Namespace) -> bool:
    return options.root is not None and WorkloadFiles(options.root, WORKLOADS[options.workload]).is_built()


def full(driver: Driver, options: argparse.Namespace) -> None:
    """Full fine-tuning under FSDP2."""
    arguments = ["--full", "--master-dtype", options.master_dtype, "--optim-bits", str(options.optim_bits)]
    driver.run(
        f"full fsdp x{options.ranks}",
        strategy="fsdp",
        num_ranks=options.ranks,
        num_steps=max(1, options.steps - options.warmup),
        arguments=arguments,
    )


def experts(driver: Driver, options: argparse.Namespace) -> None:
    """Full fine-tuning of experts that are gathered in each layer, then of experts that ranks own."""
    arguments = ["--full", "--master-dtype", options.master_dtype, "--optim-bits", str(options.optim_bits)]
    for strategy in options.runs:
        is_mesh = strategy == EXPERTS and options.expert_parallel not in (None, options.ranks)
        driver.run(
            f"{strategy} x{options.ranks}" + (f", in shares of {options.expert_parallel}" if is_mesh else ""),
            strategy=strategy,
            num_ranks=options.ranks,
            num_steps=options.steps,
            arguments=[*arguments, *(["--expert-parallel", str(options.expert_parallel)] if is_mesh else [])],
        )


if __name__ == "__main__":
    sys.exit(main())
