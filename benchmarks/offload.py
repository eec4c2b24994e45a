r"""Measure activation offload: gain of double buffering, overlap of copies, front of time against memory, small cards.

    python -m benchmarks.offload buffers --out runs/offload \
        --cells qwen3-8b-qlora@16384,49152 qwen3-14b-qlora@16384 qwen3-32b-qlora@16384
    python -m benchmarks.offload overlap --out runs/offload --cells qwen3-0.6b-lora@8192 qwen3-14b-qlora@16384
    python -m benchmarks.offload small-cards --out runs/offload \
        --cards qwen3-8b-qlora=8 qwen3-14b-qlora=12 qwen3-32b-qlora=24
    python -m benchmarks.offload front --out runs/offload --root /dev/shm/fastft \
        --workload qwen3-14b-qlora qwen3-14b-qlora-16k

Models have random weights, made on the device once per size (``small-cards`` with ``+stream``: layer by layer, and held
on the host). Every run starts from the same adapters and takes the same packs of the ruler's documents, with fused
AdamW and clipping. Per run: 3 warm-up steps (7 if a plan is measured first), 30 timed steps (10 if a step exceeds 3 s,
fewer if the budget ends; the count is in the row), then profiled ones. A time counts only if the losses of all steps
and the norm of the first gradients are those of the first run on the same packs. ``front`` uses the ruler instead
(benchmarks/offload_front.py). Results are flushed after every run; runs in raw.jsonl are not repeated.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks import offload_front
from benchmarks.offload_rig import FULL_HOST_PLAN, LEAST_STEPS, Rig, Run, disagreement, exposed_ms
from benchmarks.results import append_rows
from benchmarks.ruler.cases import CaseLog
from benchmarks.ruler.report import read_records
from benchmarks.ruler.workloads import WORKLOADS

# Published for Unsloth on a B200: gain of double over single buffers in steps/s, in per cent, and their extra memory
# in GB.
PUBLISHED = {"qwen3-8b-qlora": (8.40, 0.37), "qwen3-14b-qlora": (6.70, 0.47), "qwen3-32b-qlora": (4.61, 0.23)}
MIN_HIDDEN_SHARE = 0.95
MAX_EXPOSED_SHARE = 0.01
MAX_SERIAL_SHARE = 0.20
LATE_HOST_SHARE = 0.05
# Rate of QLoRA with recompute for a first estimate of the step time, from results.csv (14B: 1,485 ms for 8,192 tokens).
GUESSED_FLOPS_PER_S = 4.2e14


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    # On SIGTERM the driver ends its processes first: SystemExit runs every finally block.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.command == "front":
        return offload_front.front(options)
    options.out.mkdir(parents=True, exist_ok=True)
    session = Session(options)
    {"buffers": buffers, "overlap": overlap, "small-cards": small_cards}[options.command](session, options)
    print(session.write_table(), flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, required=True, help="folder for raw.jsonl, rows.csv and table.txt")
    shared.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    shared.add_argument("--steps", type=int, default=30)
    shared.add_argument("--budget-s", type=float, default=3600.0)
    cells = {"nargs": "+", "metavar": "WORKLOAD@TOKENS[,TOKENS]", "required": True}
    one = commands.add_parser("buffers", parents=[shared], help="two staging buffers, one, and plain recompute")
    one.add_argument("--cells", **cells)
    one.add_argument("--modes", nargs="+", default=["recompute", "offload1", "offload"])
    two = commands.add_parser("overlap", parents=[shared], help="copies under compute, from profiler intervals")
    two.add_argument("--cells", **cells)
    two.add_argument("--delay-ms", type=float, default=2.0)
    three = commands.add_parser("small-cards", parents=[shared], help="training under a hard cap on device memory")
    three.add_argument("--cards", nargs="+", metavar="WORKLOAD=GIB", required=True)
    three.add_argument("--tokens", type=int, default=8192)
    three.add_argument(
        "--modes", nargs="+", default=["auto:64+fused"], help='tried in order until one trains; "auto" gets the budget'
    )
    three.add_argument(
        "--without-reference", action="store_true", help="do not compare losses with those of recompute without a cap"
    )
    three.add_argument("--optimizer", default="adamw_8bit", choices=("adamw_8bit", "adamw_fused"))
    offload_front.add_arguments(commands, shared)
    return parser


class Session:
    """The files and the time budget of one call.

    Args:
        options: Options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.is_cuda = options.device == "cuda"
        self.deadline = time.monotonic() + options.budget_s
        self.out: Path = options.out
        self.command: str = options.command
        self._records = [
            record for record in read_records(self.out / "raw.jsonl") if record.get("command_name") == self.command
        ]
        self._log = CaseLog(self.out / "raw.jsonl")
        self._command_line = "python -m benchmarks.offload " + " ".join(sys.argv[1:])

    @property
    def records(self) -> list[dict[str, Any]]:
        """The latest record of every run."""
        return list({_key(record): record for record in self._records}.values())

    @property
    def left_s(self) -> float:
        """Remaining seconds of the budget."""
        return self.deadline - time.monotonic()

    def find(self, workload: str, run: Run) -> dict[str, Any] | None:
        """Return the record of an earlier call in which this run succeeded."""
        wanted = (workload, run.num_tokens, run.title)
        return next((record for record in self.records if _key(record) == wanted and not record["reason"]), None)

    def write(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write a record to the raw log, its figures to rows.csv, and the present table."""
        record = {"command_name": self.command, **record}
        self._records.append(record)
        self._log.write(record)
        append_rows(result_rows(record, command=self._command_line), path=self.out / "rows.csv")
        print(_line(record), flush=True)
        self.write_table()
        return record

    def write_table(self) -> str:
        """Write the table of all records and return it."""
        table = {"buffers": buffers_table, "overlap": overlap_table, "small-cards": cards_table}[self.command](
            self.records
        )
        (self.out / "table.txt").write_text(table + "\n", encoding="utf-8")
        return table

    def refuse(self, workload: str, run: Run, reason: str) -> dict[str, Any]:
        """Write why a run has no figures."""
        return self.write({"workload": workload, **vars(run), "title": run.title, "reason": reason})


def parse_cells(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Return (workload, tokens) of every cell.

    Example:
        >>> parse_cells(["tiny@256,512"])
        [('tiny', 256), ('tiny', 512)]
    """
    cells = []
    for text in texts:
        name, _, counts = text.partition("@")
        if name not in WORKLOADS or not counts:
            raise ValueError(f"A cell is WORKLOAD@TOKENS[,TOKENS] with one of {', '.join(WORKLOADS)}; got {text!r}.")
        cells += [(name, int(count)) for count in counts.split(",")]
    return cells


def buffers(session: Session, options: argparse.Namespace) -> None:
    """Measure every mode of every cell; the first mode is the reference of the others."""
    rig: Rig | None = None
    for name, num_tokens in parse_cells(options.cells):
        reference: dict[str, Any] | None = None
        for mode in options.modes:
            # Without an engine there is nothing to profile.
            run = Run(mode, num_tokens, num_steps=options.steps, num_profiles=int(mode.startswith(("offload", "auto"))))
            record = session.find(name, run)
            if record is None:
                # The fewest steps for a rate, and the steps around them.
                needed_s = guess_step_s(name, num_tokens) * 10 if session.is_cuda else 0.0
                if session.left_s < needed_s:
                    session.refuse(
                        name,
                        run,
                        f"not started: {session.left_s:.0f} s of the budget left, about {needed_s:.0f} s needed",
                    )
                    continue
                rig = _rig_for(rig, name, session)
                record = rig.measure(run, deadline=session.deadline)
                if record["reason"]:
                    rig = _dropped(rig)
                elif reference is not None:
                    record["reason"] = disagreement(record, reference)
                session.write(record)
            if reference is None and not record["reason"]:
                reference = record


def overlap(session: Session, options: argparse.Namespace) -> None:
    """Profile inputs on the host and all tensors on the host, with a normal and with a delayed host, and the control on
    one stream.
    """
    rig: Rig | None = None
    delay = options.delay_ms
    for name, num_tokens in parse_cells(options.cells):
        shared = {"num_tokens": num_tokens, "num_steps": min(3, options.steps), "num_profiles": 3}
        # Only the measurements are needed, because the plan is replaced after one step: no host memory for it. On a CPU
        # a budget prevents "auto" from keeping everything.
        auto = {"mode": "auto:0.001" if session.is_cuda else "auto=1000", "plan": FULL_HOST_PLAN, **shared}
        runs = [
            Run("offload", **shared),
            Run("offload", delay_ms=delay, **shared),
            Run("offload", is_serial=True, **shared),
            Run(**auto),
            Run(delay_ms=delay, **auto),
        ]
        for run in runs:
            if session.find(name, run) is not None:
                continue
            needed_s = guess_step_s(name, num_tokens) * 12 if session.is_cuda else 0.0
            if session.left_s < needed_s:
                session.refuse(
                    name, run, f"not started: {session.left_s:.0f} s of the budget left, about {needed_s:.0f} s needed"
                )
                continue
            rig = _rig_for(rig, name, session)
            record = session.write(rig.measure(run, deadline=session.deadline))
            if record["reason"]:
                rig = _dropped(rig)


def small_cards(session: Session, options: argparse.Namespace) -> None:
    """Build and train each model with the allocator capped at the budget; the first mode that trains counts."""
    for text in options.cards:
        name, _, gib = text.partition("=")
        cap_gib = float(gib)
        for mode in options.modes:
            budgeted = f"auto={cap_gib:g}{mode.removeprefix('auto')}" if mode.startswith(("auto:", "auto+")) else mode
            run = Run(budgeted, options.tokens, num_steps=options.steps, num_profiles=0, checks_plan=False)
            record = session.find(name, run) or session.write(_capped(name, run, cap_gib, session, options))
            if not record["reason"]:
                break


def _capped(name: str, run: Run, cap_gib: float, session: Session, options: argparse.Namespace) -> dict[str, Any]:
    if session.is_cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * 2**30 / total))
    rig = Rig(WORKLOADS[name], is_cuda=session.is_cuda, optimizer=options.optimizer)
    # The cap of a smaller device: a step above the budget fails.
    record = rig.measure(run, deadline=session.deadline)
    record["cap_gib"] = cap_gib
    if session.is_cuda:
        # The largest peak is the memory that the card needs.
        parts = ["peak_gib", "peak_gib_warmup", "peak_gib_load"]
        record["reserved_gib"] = max(record.get(part, {}).get("reserved", 0.0) for part in parts)
        torch.cuda.set_per_process_memory_fraction(1.0)
    if not record["reason"] and not options.without_reference:
        # The same packs and adapters without a cap.
        layers = [part for part in run.mode.split("+")[1:] if part.startswith(("fused", "tiles"))]
        mode = "+".join(["recompute", *layers])
        reference = rig.measure(Run(mode, run.num_tokens, num_steps=LEAST_STEPS, num_profiles=0))
        record["reference"] = {"reason": reference["reason"], "losses": reference.get("losses", [])}
        record["reason"] = reference["reason"] or disagreement(record, reference)
    rig.close()
    return record


def _rig_for(rig: Rig | None, name: str, session: Session) -> Rig:
    """Return the rig of this workload, after the model of another one has left the device."""
    if rig is not None and rig.workload.name == name:
        return rig
    if rig is not None:
        rig.close()
    return Rig(WORKLOADS[name], is_cuda=session.is_cuda)


def _dropped(rig: Rig) -> None:
    """Drop the rig, because the state after a failed run is unknown."""
    rig.close()


def guess_step_s(name: str, num_tokens: int) -> float:
    """Return the approximate time of a step with recompute: three products per token and weight of the layers."""
    config = WORKLOADS[name].model_config
    attention = (
        2 * config["hidden_size"] * config["head_dim"] * (config["num_attention_heads"] + config["num_key_value_heads"])
    )
    num_weights = config["num_hidden_layers"] * (attention + 3 * config["hidden_size"] * config["intermediate_size"])
    return 6 * num_weights * num_tokens / GUESSED_FLOPS_PER_S


def result_rows(record: dict[str, Any], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv, without runs that have a reason."""
    if record["reason"]:
        return []
    packages, summary = record["versions"], record["summary"]
    shared = {
        "benchmark": f"offload {record['command_name']}",
        "workload": f"{record['workload']}, packed, {record['num_tokens']} tokens",
        "system": f"ours {record['title']}",
        "version": "; ".join(
            f"{name} {packages[name]}" for name in ("lightning_fastft", "torch", "transformers") if name in packages
        ),
        "command": command,
        "device": packages.get("device", "cpu"),
        "n": summary["n"],
    }
    figures: list[tuple[str, Any, str]] = [
        ("tokens", record["tokens_per_s"], "tokens/s"),
        ("peak allocated", record["peak_gib"]["allocated"], "GiB"),
        ("peak reserved", record.get("reserved_gib", record["peak_gib"]["reserved"]), "GiB"),
    ]
    uses = record.get("copies") or []
    if uses:
        figures += [
            ("exposed copies", exposed_ms(record), "ms"),
            ("copies under kernels", min(use["covered_share"] for use in uses) * 100, "%"),
            ("copies not waited for", min(use["hidden_share"] for use in uses) * 100, "%"),
        ]
    step = {
        **shared,
        "metric": "step",
        "value": summary["median"],
        "p10": summary["p10"],
        "p90": summary["p90"],
        "unit": "ms",
    }
    return [step, *({**shared, "metric": metric, "value": value, "unit": unit} for metric, value, unit in figures)]


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return record["workload"], record["num_tokens"], record["title"]


def _line(record: dict[str, Any]) -> str:
    head = f"{record['workload']} {record['num_tokens']} {record['title']}"
    if record["reason"]:
        return f"run: {head}: {record['reason']}"
    return (
        f"run: {head}: {record['summary']['median']:.1f} ms, {record['peak_gib']['allocated']:.2f} GiB, "
        f"{record['seconds']:.0f} s"
    )


def buffers_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the gain of two buffers over one and over recompute, with the formula and the published gain."""
    lines = ["buffers: ms [p10, p90] n, GiB, exposed copy ms; gain in steps/s"]
    for cell in dict.fromkeys((record["workload"], record["num_tokens"]) for record in records):
        runs = {record["mode"]: record for record in records if (record["workload"], record["num_tokens"]) == cell}
        lines.append(f"{cell[0]} at {cell[1]:,} tokens")
        for mode, record in runs.items():
            lines.append(f"  {mode:<10} {record['reason'] or _figures(record)}")
        timed = {mode: record for mode, record in runs.items() if not record["reason"]}
        if "offload" in timed:
            lines += [f"  {text}" for text in _gains(timed, cell[0])]
    return "\n".join(lines)


def _gains(timed: dict[str, dict[str, Any]], workload: str) -> list[str]:
    double = timed["offload"]
    lines = []
    for mode in ("offload1", "recompute"):
        if mode not in timed:
            continue
        other = timed[mode]
        gain = (other["summary"]["median"] / double["summary"]["median"] - 1) * 100
        extra = double["peak_gib"]["allocated"] - other["peak_gib"]["allocated"]
        published = ""
        if mode == "offload1" and workload in PUBLISHED:
            published = f" (published +{PUBLISHED[workload][0]} %, +{PUBLISHED[workload][1]} GB)"
        lines.append(f"two buffers against {mode}: {gain:+.2f} % steps/s, {extra:+.2f} GiB{published}")
    layers = double["num_layers"]
    backward_ms = timed.get("recompute", double)["backward_ms"]["median"] / layers
    uses = double.get("copies") or []
    if uses and "offload1" in timed:
        copy_ms = uses[0]["h2d_ms"] / max(1, uses[0]["num_h2d"])
        saved = timed["offload1"]["summary"]["median"] - double["summary"]["median"]
        formula = (layers - 1) * min(copy_ms, backward_ms)
        lines.append(
            f"c = {copy_ms:.2f} ms a copy, g = {backward_ms:.2f} ms a layer: (L-1)*min(c, g) = {formula:.1f} ms, "
            f"measured {saved:.1f} ms"
        )
    return lines


def _figures(record: dict[str, Any]) -> str:
    summary = record["summary"]
    text = (
        f"{summary['median']:.1f} [{summary['p10']:.1f}, {summary['p90']:.1f}] n={summary['n']}, "
        f"{record['peak_gib']['allocated']:.2f} GiB"
    )
    return f"{text}, exposed {exposed_ms(record):.2f}" if record.get("copies") else text


def overlap_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the share of copy time under kernels, the waits of compute, and whether each bar is met."""
    lines = [
        "overlap: copy ms, under kernels, not waited for, exposed ms and share of the step, late host ms (worst of the "
        "profiled steps)"
    ]
    for record in records:
        head = f"  {record['workload']} {record['num_tokens']} {record['title']:<48}"
        uses = record.get("copies") or []
        if record["reason"] or not uses:
            lines.append(f"{head} {record['reason'] or 'nothing was profiled'}")
            continue
        worst = max(uses, key=lambda use: use["exposed_ms"] / use["step_ms"] if use["step_ms"] else 0.0)
        covered = min(use["covered_share"] for use in uses)
        share = worst["exposed_ms"] / worst["step_ms"] if worst["step_ms"] else 0.0
        if record["is_serial"]:
            is_met = max(use["covered_share"] for use in uses) < MAX_SERIAL_SHARE
        else:
            # With a delayed host there is no compute to overlap with; then the waits of compute count.
            is_host_late = worst["late_host_ms"] > LATE_HOST_SHARE * worst["step_ms"]
            is_met = (
                worst["hidden_share"] if is_host_late else covered
            ) >= MIN_HIDDEN_SHARE and share < MAX_EXPOSED_SHARE
        lines.append(
            f"{head} {worst['copy_ms']:.1f}, {covered:.1%}, {worst['hidden_share']:.1%}, {worst['exposed_ms']:.2f} = "
            f"{share:.2%}, "
            f"{worst['late_host_ms']:.0f}: {_verdict(is_met)}"
        )
    return "\n".join(lines)


def cards_table(records: Sequence[dict[str, Any]]) -> str:
    """Return tokens/s, memory, losses and the norm of the first gradients under each cap."""
    lines = [
        "small cards: cap GiB, mode, tokens/s, peak allocated and reserved GiB, first and last loss, norm of the first "
        "gradients (none is zero; losses are those of recompute without a cap)"
    ]
    for record in records:
        head = f"  {record['workload']} {record['num_tokens']} within {record['cap_gib']:g} GiB, {record['title']}"
        if record["reason"]:
            lines.append(f"{head}: FAILED: {record['reason']}")
        else:
            reserved, loading = record.get("reserved_gib", 0.0), record.get("peak_gib_load", {}).get("reserved", 0.0)
            lines.append(
                f"{head}: {record['tokens_per_s']:.0f} tokens/s, {record['peak_gib']['allocated']:.2f}, "
                f"{reserved:.2f}, {record['losses'][0]:.3f}, {record['losses'][-1]:.3f}, "
                f"{record['gradient_norm']:.3g}; loading reserved {loading:.2f}: "
                f"{_verdict(reserved <= 1.02 * record['cap_gib'])}; {record['description']['text']}"
            )
    return "\n".join(lines)


def _verdict(is_met: bool) -> str:
    return "pass" if is_met else "FAIL"


if __name__ == "__main__":
    sys.exit(main())
