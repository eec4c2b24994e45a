r"""Measure tokens/s of DDP, FSDP2, context and expert parallelism, and a model built sharded.

    python -m benchmarks.multi_gpu multi --out runs/multi
    python -m benchmarks.multi_gpu multi --out runs/context --runs one context --tokens 131072 --one-document
    python -m benchmarks.multi_gpu multi --out runs/resident --runs fsdp --mode keep+resident --adapters shard
    python -m benchmarks.multi_gpu multi --out runs/70b --runs fsdp --ranks 4 --workload llama-3.3-70b-lora --mode auto:8+fused+fp8
    python -m benchmarks.multi_gpu multi --out runs/120b --runs experts --ranks 4 --workload gpt-oss-120b-lora --mode auto:16+fused
    python -m benchmarks.multi_gpu full32b --out runs/full32b --ranks 4
    python -m benchmarks.multi_gpu experts --out runs/experts --ranks 2
    python -m benchmarks.multi_gpu multi --out runs/four --ranks 4

"multi" trains Qwen3-8B LoRA in bf16 on 2 GPUs, or more: DDP and FSDP2 with 8,192 tokens per GPU, "context" with a pack of
so many tokens on all, "experts" with experts owned in shares. "full32b" trains all weights of Qwen3-32B in bf16; the model is built sharded, so no rank ever holds it
whole. The command "experts" trains all weights of 12 layers of Qwen3-30B-A3B, with expert weights gathered in each layer (fsdp) and
with experts owned in shares (experts); the losses of both must agree to 1e-3.

Weights are random and the same in every run (one seed). Two GPUs and one GPU with an accumulation of two, and so on (under
"context" one GPU without) take the same steps: their losses must agree to 1e-3. The first steps (8; --warmup) repeat the same
packs of the ruler, so that losses fall if the steps train; timed steps follow, and each has new packs. The packs of a step
have similar attention cost, as PackedDataModule gives them to ranks. Time between the ends of steps by CUDA events on
rank 0, clipping and fused AdamW included. Records are flushed run by run.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.results import append_rows
from benchmarks.ruler.arms.ours import make_trainer
from benchmarks.ruler.cases import CaseLog, versions
from benchmarks.ruler.measure import StepClock, peak_memory_gib, summarise_ms
from benchmarks.ruler.plans import describe_plan, least_warmup, parse_mode
from benchmarks.ruler.report import read_records
from benchmarks.ruler.workloads import IGNORED_LABEL, WORKLOADS, Pack, lora_config, make_packs
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.packing.collate import Document, PackedBatch, collate
from lightning_fastft.packing.packs import Packs
from lightning_fastft.packing.step_plan import BALANCE_POOL_MICRO_BATCHES, StepPlan
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimizer import FusedAdamW

RUNS = ("one", "accumulate", "ddp", "fsdp")
CONTEXT, EXPERTS = "context", "experts"
STRATEGIES = {
    "one": FastFTStrategy,
    "ddp": FastFTDDPStrategy,
    "fsdp": FastFTFSDPStrategy,
    # All ranks share each pack.
    CONTEXT: FastFTDDPStrategy,
    # Ranks own the experts in shares.
    EXPERTS: FastFTFSDPStrategy,
}
# Of as many times one GPU as there are ranks: on two, and on more.
LEAST_SHARES = {"ddp": (0.98, 0.97), "fsdp": (0.95, 0.925), CONTEXT: (0.95, 0.925)}
# Sums in another order, in bf16; measured from equal weights.
LOSS_TOLERANCE = 1e-3
# Timed steps of the run with accumulation, which is there for its losses.
NUM_ACCUMULATED = 1
# Losses that fell by less than this many tolerances would agree whatever the steps did.
LEAST_FALL = 2
LORA_LEARNING_RATE, FULL_LEARNING_RATE = 3e-4, 1e-4
LEAST_SECONDS = 30.0


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # The first steps of auto are not those of its plan.
    options.warmup = max(options.warmup, least_warmup(options.mode))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.command == "worker":
        code = worker(options)
        if options.device == "cpu":
            # With a gloo group torch (2.13) now and then aborts when the program ends, after everything is written.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
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
    shared.add_argument("--tokens", type=int, default=8192, help="of a pack")
    shared.add_argument("--one-document", action="store_true", help="whose packs hold one document each")
    shared.add_argument("--mode", default="offload", help="what happens to activations, as in the ruler")
    shared.add_argument("--steps", type=int, default=30)
    shared.add_argument("--warmup", type=int, default=8, help="steps before the timed ones, all on the same packs")
    shared.add_argument("--budget-s", type=float, default=3600.0)
    shared.add_argument(
        "--adapters", default="auto", choices=("auto", "replicate", "shard"), help="of LoRA under FSDP2"
    )
    one = commands.add_parser("multi", parents=[shared], help="one GPU, DDP and FSDP2")
    one.add_argument("--workload", default="qwen3-8b-lora")
    one.add_argument("--ranks", type=int, default=2)
    one.add_argument("--runs", nargs="+", default=list(RUNS), choices=(*RUNS, CONTEXT, EXPERTS))
    two = commands.add_parser("full32b", parents=[shared], help="every weight of a large model")
    two.add_argument(
        "--workload", default="qwen3-32b-qlora", help="whose configuration is trained, in bf16 and without adapters"
    )
    two.add_argument("--ranks", type=int, default=4)
    two.add_argument("--master-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    two.add_argument("--optim-bits", type=int, default=32, choices=(8, 32), help="of the moments")
    owners = commands.add_parser(EXPERTS, parents=[shared], help="every weight of a mixture of experts")
    owners.add_argument("--workload", default="qwen3-30b-a3b-12l-lora", help="whose configuration is trained")
    owners.add_argument("--ranks", type=int, default=2)
    owners.add_argument("--master-dtype", default="bfloat16", choices=("bfloat16", "float32"))
    owners.add_argument("--optim-bits", type=int, default=32, choices=(8, 32), help="of the moments")
    owners.add_argument("--runs", nargs="+", default=["fsdp", EXPERTS], choices=("fsdp", EXPERTS))
    owners.add_argument("--expert-parallel", type=int, help="ranks that share one set of experts (all)")
    three = commands.add_parser("worker", parents=[shared], help="one rank of a run")
    three.add_argument("--workload", required=True)
    three.add_argument("--strategy", required=True, choices=tuple(STRATEGIES))
    three.add_argument("--accumulate", type=int, default=1)
    three.add_argument("--full", action="store_true")
    three.add_argument("--master-dtype", default="auto")
    three.add_argument("--optim-bits", type=int, default=32)
    three.add_argument("--expert-parallel", type=int)
    three.add_argument("--title", required=True)
    return parser


class Driver:
    """Start runs one after the other, each in processes of its own, within the budget.

    Args:
        options: Of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._raw: Path = options.out / "raw.jsonl"
        self._deadline = time.monotonic() + options.budget_s
        self._command = "python -m benchmarks.multi_gpu " + " ".join(sys.argv[1:])

    def run(self, title: str, *, strategy: str, num_ranks: int, num_steps: int, arguments: Sequence[str] = ()) -> None:
        """Run one strategy on some ranks, unless an earlier call has it; whatever becomes of it, a record says so."""
        if any(record["title"] == title and not record["reason"] for record in read_records(self._raw)):
            return
        options, left = self._options, self._deadline - time.monotonic()
        num_before = len(read_records(self._raw))
        reason = f"not started: {left:.0f} s of the budget left" if left < LEAST_SECONDS else ""
        if not reason:
            launch = (
                ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
                if num_ranks > 1
                else []
            )
            command = [
                sys.executable,
                *launch,
                "-m",
                "benchmarks.multi_gpu",
                "worker",
                "--title",
                title,
                "--strategy",
                strategy,
                "--out",
                str(options.out),
                "--device",
                options.device,
                "--tokens",
                str(options.tokens),
                "--mode",
                options.mode,
                "--steps",
                str(num_steps),
                "--warmup",
                str(options.warmup),
                "--workload",
                options.workload,
                "--budget-s",
                str(left),
                "--adapters",
                options.adapters,
                *(["--one-document"] if options.one_document else []),
                *arguments,
            ]
            reason = run_command(command, log=options.out / "log.txt", seconds=left)
        records = read_records(self._raw)[num_before:]
        if not records:
            records = [{"title": title, "reason": reason or "its processes left no record"}]
            CaseLog(self._raw).write(records[0])
        append_rows(
            [row for record in records for row in result_rows(record, command=self._command)],
            path=options.out / "rows.csv",
        )
        print(f"run: {title}: {records[-1]['reason'] or short(records[-1])}", flush=True)


def run_command(command: Sequence[str], *, log: Path, seconds: float) -> str:
    """Run a command with everything that it starts; return what went wrong, or nothing."""
    with log.open("ab") as sink:
        sink.write(f"\n===== {' '.join(command)} =====\n".encode())
        sink.flush()
        # A seed that Lightning left in the environment would be set again by the strategies of several devices only.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
        process = subprocess.Popen(
            command, env=environment, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        finally:
            # Ranks and what they started end with it, also where it has ended by itself.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if "Error" in line]
    return "" if code == 0 else f"ended with code {code}: {lines[-1][:300] if lines else ''}"


def multi(driver: Driver, options: argparse.Namespace) -> None:
    """One GPU, one GPU with as much accumulation as there are ranks, DDP, FSDP2, context and expert parallel."""
    if "one" in options.runs:
        driver.run("one GPU", strategy="one", num_ranks=1, num_steps=options.steps)
    if "accumulate" in options.runs:
        arguments = ["--accumulate", str(options.ranks)]
        driver.run(
            f"one GPU, accumulation {options.ranks}",
            strategy="one",
            num_ranks=1,
            num_steps=NUM_ACCUMULATED,
            arguments=arguments,
        )
    for strategy in ("ddp", "fsdp", CONTEXT, EXPERTS):
        if strategy in options.runs:
            is_cut = strategy == "fsdp" and options.adapters == "shard"
            driver.run(
                f"{strategy} x{options.ranks}{', adapters sharded' if is_cut else ''}",
                strategy=strategy,
                num_ranks=options.ranks,
                num_steps=options.steps,
            )


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


def worker(options: argparse.Namespace) -> int:
    """Train as one rank; rank 0 writes the record."""
    is_cuda = options.device == "cuda"
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    num_sharing = num_ranks if options.strategy == CONTEXT else 1
    num_step_packs = num_ranks // num_sharing * options.accumulate
    # Whole pools, so that runs of few and of many steps take the same ones.
    num_pool_steps = -(-options.steps // BALANCE_POOL_MICRO_BATCHES) * BALANCE_POOL_MICRO_BATCHES
    workload = replace(
        WORKLOADS[options.workload],
        max_tokens=options.tokens,
        num_packs=num_step_packs * (1 + (options.steps if num_step_packs == 1 else num_pool_steps)),
        document_lengths=(options.tokens,) if options.one_document else None,
    )
    torch.manual_seed(0)
    record: dict[str, Any] = {
        "title": options.title,
        "workload": options.workload,
        "strategy": options.strategy,
        "num_ranks": num_ranks,
        "accumulate": options.accumulate,
        "num_tokens": options.tokens,
        "num_warmup": options.warmup,
        "optim_bits": options.optim_bits,
        "num_sharing": num_sharing,
        "is_one_document": options.one_document,
        "mode": options.mode,
        "adapters": options.adapters,
        "versions": versions(),
        "reason": "",
    }
    num_steps = options.warmup + options.steps
    tuner = make_tuner(workload, options)
    mode = parse_mode(options.mode)
    checkpointing = mode.checkpointing
    follow = RankCallback(record, num_steps=num_steps, num_micro=num_steps * options.accumulate, is_cuda=is_cuda)
    num_owners = options.expert_parallel or num_ranks
    sizes = {
        CONTEXT: {"context_parallel": num_sharing},
        # Ranks that share a set of experts share one copy of all weights.
        EXPERTS: {"expert_parallel": num_owners, "shard": num_owners},
    }
    kind = STRATEGIES[options.strategy]
    choices = {"adapters": options.adapters} if kind is FastFTFSDPStrategy else {}
    strategy = kind(activations=checkpointing, **choices, **sizes.get(options.strategy, {}))
    trainer = make_trainer(
        strategy,
        follow,
        max_steps=num_steps,
        is_cuda=is_cuda,
        devices=num_ranks,
        accumulate_grad_batches=options.accumulate,
        max_epochs=-1,
    )
    trainer.callbacks.extend(mode.callbacks(is_cuda=is_cuda))
    if workload.num_experts:
        trainer.callbacks.append(BincountRouter())
    packs = make_packs(workload)
    share = Share(
        [*packs[:num_step_packs], *balance(packs[num_step_packs:], num_step_packs=num_step_packs)],
        rank=rank // num_sharing,
        num_ranks=num_ranks // num_sharing,
        accumulate=options.accumulate,
        num_warmup=options.warmup,
    )
    rows = range(num_steps * options.accumulate)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=None, shuffle=False, collate_fn=share.batch, pin_memory=is_cuda
    )
    follow.begin = time.monotonic()
    trainer.fit(tuner, train_dataloaders=loader)
    if rank == 0:
        CaseLog(options.out / "raw.jsonl").write(record)
    return 0


def make_tuner(workload: Any, options: argparse.Namespace) -> FineTuner:
    """Return a FineTuner with random weights: adapters on a frozen base, or every weight trained."""
    is_cuda = options.device == "cuda"
    if options.full:
        choices: dict[str, Any] = {
            "learning_rate": FULL_LEARNING_RATE,
            "master_dtype": options.master_dtype if is_cuda else "auto",
            "optimizer": functools.partial(FusedAdamW, optim_bits=options.optim_bits),
        }
    else:
        lora = lora_config(workload)
        lora.init_lora_weights = False
        choices = {"lora": lora, "learning_rate": LORA_LEARNING_RATE, "quantization": workload.quantization}
    return FineTuner(
        {"model_type": workload.model_type, **workload.model_config},
        init="random",
        dtype="bfloat16" if is_cuda else "float32",
        scheduler="constant",
        warmup_share=0.0,
        **choices,
    )


def balance(packs: Sequence[Pack], *, num_step_packs: int) -> list[Pack]:
    """Return packs in the order in which PackedDataModule trains them: those of a step have similar attention cost."""
    if num_step_packs == 1:
        return list(packs)
    length_N = np.concatenate([pack.lengths for pack in packs])
    starts = np.cumsum([0, *(len(pack.lengths) for pack in packs)])
    size = num_step_packs * BALANCE_POOL_MICRO_BATCHES
    order: list[int] = []
    for begin in range(0, len(packs), size):
        part = starts[begin : begin + size + 1]
        own = Packs(
            document_N=np.arange(part[0], part[-1]), start_P1=part - part[0], max_tokens=packs[0].input_id_T.size
        )
        plan = StepPlan(
            own, length_N=length_N, num_labelled_N=length_N - 1, seed=0, world_size=num_step_packs, accumulate=1
        )
        order += (begin + plan.epoch(0).pack_MR.reshape(-1)).tolist()
    return [packs[number] for number in order]


class Share:
    """The packs of one rank, their losses divided by the tokens of the whole optimizer step.

    Args:
        packs: Of the warm-up steps, which repeat them, then of each timed step.
        rank: Whose share; of ranks that share packs, their group.
        num_ranks: Ranks, or groups.
        accumulate: Micro-batches of a rank in one step.
        num_warmup: Warm-up steps.
    """

    def __init__(self, packs: Sequence[Pack], *, rank: int, num_ranks: int, accumulate: int, num_warmup: int) -> None:
        self._packs, self._num_warmup = packs, num_warmup
        self._rank, self._num_ranks, self._accumulate = rank, num_ranks, accumulate

    def batch(self, number: int) -> PackedBatch:
        """Return a micro-batch of this rank by its number."""
        step, micro = divmod(number, self._accumulate)
        num_packs = self._num_ranks * self._accumulate
        begin = max(0, step - self._num_warmup + 1) * num_packs
        packs = self._packs[begin : begin + num_packs]
        num_labelled = sum(int((pack.label_T(1.0) != IGNORED_LABEL).sum()) for pack in packs)
        pack = packs[micro * self._num_ranks + self._rank]
        return collate(
            [Document(ids, labels) for ids, labels in pack.documents(1.0)], num_items=num_labelled / num_packs
        )


class RankCallback(Callback):
    """Follow the run of one rank.

    Args:
        record: Filled on every rank, written by rank 0.
        num_steps: Optimizer steps, warm-up included.
        num_micro: Micro-batches.
        is_cuda: Whether steps run on a GPU.
    """

    def __init__(self, record: dict[str, Any], *, num_steps: int, num_micro: int, is_cuda: bool) -> None:
        self.begin = 0.0
        self._record, self._num_steps, self._num_micro, self._is_cuda = record, num_steps, num_micro, is_cuda
        self._clock = StepClock(is_cuda=is_cuda)
        self._losses: list[torch.Tensor] = []
        self._num_done = 0
        self._setup = 0.0

    def setup(self, trainer: Trainer, pl_module: FineTuner, stage: str) -> None:
        """The devices are known, the model is not built."""
        self._setup = time.monotonic()

    def on_fit_start(self, trainer: Trainer, pl_module: FineTuner) -> None:
        """The model is built."""
        if self._is_cuda:
            torch.cuda.synchronize()
        self._record["build_s"] = time.monotonic() - self._setup
        self._record["launch_s"] = self._setup - self.begin
        self._record["peak_gib_build"] = self._gather(peak_memory_gib(is_cuda=self._is_cuda)["allocated"])

    def on_train_start(self, trainer: Trainer, pl_module: FineTuner) -> None:
        """Note what is active."""
        self._record["statuses"] = [
            f"{status.name}: {status.state}: {status.reason}" for status in trainer.strategy.statuses()
        ]
        self._record["num_trained"] = sum(
            parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad
        )

    def on_before_backward(self, trainer: Trainer, pl_module: FineTuner, loss: torch.Tensor) -> None:
        """Keep the loss, already divided by the accumulation."""
        self._losses.append(loss.detach().float())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: FineTuner, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the end of an optimizer step."""
        if trainer.global_step == self._num_done:
            return
        self._num_done = trainer.global_step
        num_warmup = self._record["num_warmup"]
        if self._num_done == num_warmup and self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        if self._num_done >= num_warmup:
            self._clock.mark()

    def on_train_end(self, trainer: Trainer, pl_module: FineTuner) -> None:
        """Bring everything together; every rank takes part."""
        step_ms = self._clock.read_ms()
        summary = summarise_ms(step_ms)
        peak = peak_memory_gib(is_cuda=self._is_cuda)
        # The mean over the ranks, the sum over the micro-batches of a step.
        losses = torch.stack(self._losses).view(self._num_done, -1).sum(dim=1)
        if self._record["num_ranks"] > 1:
            torch.distributed.all_reduce(losses)
            losses /= self._record["num_ranks"]
        self._record.update(
            ms=step_ms,
            summary=summary,
            losses=losses.tolist(),
            peak_gib=self._gather(peak["allocated"]),
            reserved_gib=self._gather(peak["reserved"]),
            tokens_per_s=self._record["num_tokens"]
            * (self._record["num_ranks"] // self._record["num_sharing"])
            * self._record["accumulate"]
            / summary["median"]
            * 1e3,
            description=describe_plan(trainer.strategy.checkpointing),
        )

    def _gather(self, value: float) -> list[float]:
        """Return the value of every rank."""
        if self._record["num_ranks"] == 1:
            return [value]
        found: list[Any] = [None] * self._record["num_ranks"]
        torch.distributed.all_gather_object(found, value)
        return found


def result_rows(record: dict[str, Any], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv; a run that failed has none."""
    if record["reason"]:
        return []
    found, summary = record["versions"], record["summary"]
    kind = "one document" if record["is_one_document"] else "packed"
    shared = {
        "benchmark": "multi_gpu",
        "workload": f"{record['workload']}, {kind}, {record['num_tokens']} tokens a pack, {record['mode']}"
        + (", moments in 8 bits" if record["optim_bits"] == 8 else ""),
        "system": f"ours {record['title']}",
        "version": "; ".join(
            f"{name} {found[name]}" for name in ("lightning_fastft", "torch", "transformers") if name in found
        ),
        "command": command,
        "device": f"{record['num_ranks']} x {found.get('device', 'cpu')}",
        "n": summary["n"],
    }
    step = {
        **shared,
        "metric": "step",
        "value": summary["median"],
        "p10": summary["p10"],
        "p90": summary["p90"],
        "unit": "ms",
    }
    figures = [
        ("tokens", record["tokens_per_s"], "tokens/s"),
        ("peak allocated, largest rank", max(record["peak_gib"]), "GiB"),
        ("peak reserved, largest rank", max(record["reserved_gib"]), "GiB"),
        ("build", record["build_s"], "s"),
        ("last loss", record["losses"][-1], "nats"),
    ]
    return [step, *({**shared, "metric": metric, "value": value, "unit": unit} for metric, value, unit in figures)]


def short(record: dict[str, Any]) -> str:
    """Return a record in one line."""
    summary = record["summary"]
    peaks = ", ".join(f"{gib:.1f}" for gib in record["peak_gib"])
    return (
        f"{record['tokens_per_s']:.0f} tokens/s, {summary['median']:.1f} ms [{summary['p10']:.1f}, "
        f"{summary['p90']:.1f}] n={summary['n']}, "
        f"peak {peaks} GiB, built in {record['build_s']:.0f} s"
    )


def multi_table(records: Sequence[dict[str, Any]]) -> str:
    """Return tokens/s, and whether speed and losses meet their bars."""
    timed = {(record["strategy"], record["accumulate"]): record for record in records if not record["reason"]}
    lines = ["several GPUs: tokens/s, step"]
    lines += [f"  {record['title']:<24} {record['reason'] or short(record)}" for record in records]
    one = timed.get(("one", 1))
    for strategy, (on_two, on_more) in LEAST_SHARES.items():
        record = timed.get((strategy, 1))
        if record is None:
            continue
        if one is not None:
            least = record["num_ranks"] * (on_two if record["num_ranks"] == 2 else on_more)
            ratio = record["tokens_per_s"] / one["tokens_per_s"]
            lines.append(
                f"  bar: {record['title']}: {ratio:.3f} times one GPU, at least {least:.2f} wanted: "
                f"{_verdict(ratio >= least)}"
            )
        # The run on one GPU that takes the same steps.
        reference = timed.get(("one", record["num_ranks"] // record["num_sharing"]))
        if reference is not None:
            pairs = list(zip(record["losses"], reference["losses"]))
            worst = max(abs(own - other) / abs(other) for own, other in pairs)
            fall = 1 - pairs[: record["num_warmup"]][-1][1] / pairs[0][1]
            is_met = worst <= LOSS_TOLERANCE and fall >= LEAST_FALL * LOSS_TOLERANCE
            lines.append(
                f"  bar: {record['title']}: losses fell by {fall:.1%} on repeated packs and differ by {worst:.1e} in "
                f"{len(pairs)} steps: {_verdict(is_met)}"
            )
    return "\n".join(lines)


def full_table(records: Sequence[dict[str, Any]]) -> str:
    """Return how the large model trained."""
    lines = ["full fine-tuning in shards"]
    for record in records:
        lines.append(f"  {record['title']:<20} {record['reason'] or short(record)}")
        if not record["reason"]:
            losses = record["losses"]
            lines += [
                f"    losses: {', '.join(f'{loss:.4f}' for loss in losses)}",
                f"    reserved {', '.join(f'{gib:.1f}' for gib in record['reserved_gib'])} GiB, "
                f"while built {', '.join(f'{gib:.1f}' for gib in record['peak_gib_build'])} GiB",
                f"    bar: {len(losses)} steps, all losses finite and falling on repeated packs: "
                f"{_verdict(all(loss == loss for loss in losses) and losses[: record['num_warmup']][-1] < losses[0])}",
            ]
    return "\n".join(lines)


def expert_table(records: Sequence[dict[str, Any]]) -> str:
    """Return tokens/s of gathered and owned experts, and whether their losses agree."""
    lines = ["experts: tokens/s, step"]
    lines += [f"  {record['title']:<24} {record['reason'] or short(record)}" for record in records]
    timed = {record["strategy"]: record for record in records if not record["reason"]}
    if {"fsdp", EXPERTS} <= timed.keys():
        gathered, owned = timed["fsdp"], timed[EXPERTS]
        pairs = list(zip(owned["losses"], gathered["losses"]))
        worst = max(abs(own - other) / abs(other) for own, other in pairs)
        ratio = owned["tokens_per_s"] / gathered["tokens_per_s"]
        lines += [
            f"  owned experts: {ratio:.3f} times gathered ones",
            f"  bar: losses differ by {worst:.1e} in {len(pairs)} steps: {_verdict(worst <= LOSS_TOLERANCE)}",
        ]
    return "\n".join(lines)


def _verdict(is_met: bool) -> str:
    return "pass" if is_met else "FAIL"


if __name__ == "__main__":
    sys.exit(main())
