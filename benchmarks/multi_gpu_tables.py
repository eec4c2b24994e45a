"""Rows and tables of benchmarks/multi_gpu.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.multi_gpu_steps import CONTEXT, EXPERTS

# Targets as shares of the number of ranks times one GPU: for two ranks, and for more.
LEAST_SHARES = {"ddp": (0.98, 0.97), "fsdp": (0.95, 0.925), CONTEXT: (0.95, 0.925)}
# Sums in another order, in bf16; measured from equal weights.
LOSS_TOLERANCE = 1e-3
# Losses that fell by less than this many tolerances would agree in any case.
LEAST_FALL = 2


def result_rows(record: dict[str, Any], *, command: str) -> list[dict[str, Any]]:
    """Return rows for results.csv, without those of failed runs."""
    if record["reason"]:
        return []
    packages, summary = record["versions"], record["summary"]
    kind = "one document" if record["is_one_document"] else "packed"
    shared = {
        "benchmark": "multi_gpu",
        "workload": f"{record['workload']}, {kind}, {record['num_tokens']} tokens a pack, {record['mode']}"
        + (", moments in 8 bits" if record["optim_bits"] == 8 else ""),
        "system": record["title"] if is_peer(record) else f"ours {record['title']}",
        "version": "; ".join(f"{name} {packages[name]}" for name in _packages(record) if name in packages),
        "command": command,
        "device": f"{record['num_ranks']} x {packages.get('device', 'cpu')}",
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


def is_peer(record: dict[str, Any]) -> bool:
    """Return whether a record is that of a peer: its strategy is SYSTEM-STRATEGY."""
    return "-" in record["strategy"]


def _packages(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the packages whose versions are in a row."""
    if not is_peer(record):
        return ("lightning_fastft", "torch", "transformers")
    more = ("unsloth", "trl") if record["strategy"].startswith("unsloth") else ()
    return (*more, *(("liger_kernel",) if "liger" in record["mode"] else ()), "torch", "transformers", "accelerate")


def short(record: dict[str, Any]) -> str:
    """Return a record in one line."""
    summary = record["summary"]
    peaks = ", ".join(f"{gib:.1f}" for gib in record["peak_gib"])
    reserved = max(record["reserved_gib"])
    return (
        f"{record['tokens_per_s']:.0f} tokens/s, {summary['median']:.1f} ms [{summary['p10']:.1f}, "
        f"{summary['p90']:.1f}] n={summary['n']}, "
        f"peak {peaks} GiB, reserved {reserved:.1f} GiB, built in {record['build_s']:.0f} s"
    )


def multi_table(records: Sequence[dict[str, Any]]) -> str:
    """Return tokens/s, and whether speed and losses meet their bars."""
    width = max([24, *(len(record["title"]) for record in records)])
    lines = ["several GPUs: tokens/s, step"]
    lines += [f"  {record['title']:<{width}} {record['reason'] or short(record)}" for record in records]
    peers = [record for record in records if not record["reason"] and is_peer(record)]
    timed = {(record["strategy"], record["accumulate"]): record for record in records if not record["reason"]}
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
            lines.append(_compare_losses(record, reference))
    for strategy in ("fsdp", "ddp"):
        ours = timed.get((strategy, 1))
        for record in peers if ours is not None else ():
            if record["strategy"].endswith(strategy):
                ratio = ours["tokens_per_s"] / record["tokens_per_s"]
                lines.append(f"  {ours['title']}: {ratio:.3f} times {record['title']}")
    # A step of as many ranks is the same under any sharding.
    ours = timed.get(("fsdp", 1)) or timed.get(("ddp", 1))
    lines += [_compare_losses(record, ours) for record in peers if ours is not None]
    return "\n".join(lines)


def _compare_losses(record: dict[str, Any], reference: dict[str, Any]) -> str:
    """Return the bar of a run whose steps are those of a reference."""
    pairs = list(zip(record["losses"], reference["losses"]))
    worst = max(abs(own - other) / abs(other) for own, other in pairs)
    fall = 1 - pairs[: record["num_warmup"]][-1][1] / pairs[0][1]
    is_met = worst <= LOSS_TOLERANCE and fall >= LEAST_FALL * LOSS_TOLERANCE
    return (
        f"  bar: {record['title']}: losses fell by {fall:.1%} on repeated packs and differ by {worst:.1e} in "
        f"{len(pairs)} steps from {reference['title']}: {_verdict(is_met)}"
    )


def full_table(records: Sequence[dict[str, Any]]) -> str:
    """Return a summary of the large model's run."""
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
