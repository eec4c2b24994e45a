"""Content of the run report: the measurements of a run and the facts about it, as plain values for JSON."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from lightning_fastft.activations.budgets import peak_memory_bytes, peak_reserved_bytes
from lightning_fastft.checkpoint.stops import RunStopped
from lightning_fastft.core.status import Status
from lightning_fastft.monitor.generate_samples import GenerateSamples
from lightning_fastft.monitor.report.facts import (
    describe_checkpoints,
    describe_command,
    describe_model,
    describe_options,
    describe_versions,
    without_secrets,
)
from lightning_fastft.monitor.report.findings import (
    describe_plan,
    describe_profile,
    describe_rows,
    describe_waits,
    find_limit,
    find_max_tokens,
)
from lightning_fastft.monitor.report.losses import NUM_ENDS
from lightning_fastft.monitor.report.record import RunRecord
from lightning_fastft.monitor.report.verdict import judge
from lightning_fastft.monitor.token_throughput import GIB
from lightning_fastft.strategies.packed_steps import collect_statuses
from lightning_fastft.strategies.patching import callbacks_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

SCHEMA = "lightning_fastft.run_report"
SCHEMA_VERSION = 2


def collect(
    run: RunRecord,
    trainer: Trainer,
    pl_module: LightningModule,
    *,
    profile_step: int | None,
    state: str,
    error: BaseException | None,
) -> dict[str, Any]:
    """Return the content of the report as plain values for JSON, without secrets."""
    is_cuda = run.device.type == "cuda"
    model = describe_model(pl_module)
    ranks = run.ranks or [
        {
            "rank": trainer.global_rank,
            "peak_memory_gib": peak_memory_bytes(run.device) / GIB,
            "reserved_memory_gib": peak_reserved_bytes(run.device) / GIB,
            "tokens_per_s": run.times.rate(),
        }
    ]
    profiled_step = None if profile_step is None else run.first_step + run.profiled_step
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "outcome": {"state": state, **_describe_error(error)},
        "resumed": None if run.first_step == 0 else {"step": run.first_step, "checkpoint": run.source},
        "head": {**model, **_head(run, trainer, ranks=ranks)},
        "validation": _describe_validation(run),
        "checkpoints": describe_checkpoints(trainer),
        "statuses": [status._asdict() for status in _statuses(trainer)],
        "plans": [describe_plan(cost, plan) for cost, plan in run.plans],
        "packing": run.packs.to_dict(max_tokens=find_max_tokens(trainer), limit=find_limit(trainer)),
        "data": describe_rows(trainer),
        "curves": _curves(run, trainer),
        "samples": next(
            (found.describe() for found in callbacks_of(trainer) if isinstance(found, GenerateSamples)), None
        ),
        "learning_rates": _describe_learning_rates(run),
        "logged": _describe_values(run),
        "times": run.times.to_dict(is_cuda=is_cuda),
        "slowest": run.times.slowest_to_dict(first_step=run.first_step),
        "ranks": ranks,
        "profile": describe_profile(run.trace, step=profiled_step, is_cuda=is_cuda, why_not=run.why_no_trace),
        "waits": describe_waits(run.detector, is_cuda=is_cuda),
        "options": describe_options(trainer, pl_module),
        "versions": describe_versions(),
        "command": describe_command(),
    }
    data = without_secrets(data)
    data["outcome"]["level"], data["outcome"]["verdict"] = judge(data)
    return data


def _head(run: RunRecord, trainer: Trainer, *, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return device, times, speed, memory and losses of the run."""
    is_cuda = run.device.type == "cuda"
    rates = [rank["tokens_per_s"] for rank in ranks]
    num_ends = _num_ends(run)
    return {
        "device": torch.cuda.get_device_name(run.device) if is_cuda else "CPU",
        "num_ranks": trainer.world_size,
        "started": run.started,
        "seconds": time.monotonic() - run.began_s,
        "num_steps": run.step,
        "last_step": trainer.global_step,
        # What losses and host syncs are counted by. With manual optimization a batch may have several optimizer steps.
        "unit": "step" if run.num_windows == run.step else "batch",
        "num_batches": run.num_batches,
        "tokens_per_s": sum(rates) if all(rate is not None for rate in rates) else None,
        "peak_memory_gib": max(rank["peak_memory_gib"] for rank in ranks),
        "reserved_memory_gib": max(rank["reserved_memory_gib"] for rank in ranks),
        "memory_of": "device, highest rank" if is_cuda else "process, from its start",
        "num_loss_steps": num_ends,
        "first_step_loss": run.losses.first(1),
        "first_loss": run.losses.first(num_ends),
        "final_loss": run.losses.final(num_ends),
    }


def _describe_values(run: RunRecord) -> list[dict[str, Any]]:
    """Return the curves of what training logged on this rank, with means over the first and the last steps."""
    num_ends = _num_ends(run)
    return [
        {
            "name": name,
            "first": values.first(num_ends),
            "final": values.final(num_ends),
            **values.curve.to_dict(first_step=run.first_step),
        }
        for name, values in run.values.items()
    ]


def _describe_validation(run: RunRecord) -> dict[str, Any] | None:
    """Return step and values of the last validation, and the curves over all of them."""
    step, values = run.last_validation
    if not run.validations:
        return None
    metrics = [
        {"name": name, "value": values.get(name), "num_not_finite": run.not_finite[name], **curve.to_dict()}
        for name, curve in run.validations.items()
    ]
    return {"step": step, "metrics": metrics}


def _describe_learning_rates(run: RunRecord) -> list[dict[str, Any]]:
    """Return the different learning rates; parameter groups of an optimizer with equal rates are shown as one."""
    found: dict[tuple[str, str], tuple[list[str], dict[str, Any]]] = {}
    for name, curve in run.learning_rates.items():
        described = curve.to_dict(first_step=run.first_step)
        optimizer = name.partition("/")[0]
        found.setdefault((optimizer, repr(described)), ([], described))[0].append(name)
    num_rates = Counter(optimizer for optimizer, _ in found)
    return [
        {"name": optimizer if num_rates[optimizer] == 1 else ", ".join(names), **described}
        for (optimizer, _), (names, described) in found.items()
    ]


def _num_ends(run: RunRecord) -> int:
    """Return how many steps or batches first and final values are means of: at most a quarter of the run each."""
    return max(1, min(NUM_ENDS, run.num_windows // 4))


def _curves(run: RunRecord, trainer: Trainer) -> dict[str, Any]:
    """Return the curves of loss and tokens per second."""
    is_alone = trainer.world_size > 1 and run.why_alone
    return {
        "loss": {
            **run.losses.curve.to_dict(first_step=run.first_step),
            "num_not_finite": run.losses.num_not_finite,
            "ranks": [trainer.global_rank] if is_alone else list(range(trainer.world_size)),
            "why_alone": run.why_alone if is_alone else "",
            "why_not": "No optimizer step ended with a loss that is a number.",
        },
        "tokens_per_s": {
            **run.times.tokens_per_s.to_dict(first_step=run.first_step),
            "why_not": "Batches are neither packed nor hold input_ids, so tokens are not known.",
        },
    }


def _describe_error(error: BaseException | None) -> dict[str, Any]:
    """Return the error that ended the run, or the signal after which it was saved."""
    if isinstance(error, RunStopped):
        return {
            "error": None,
            "stop": {
                "signal": error.signal_name,
                "step": error.step,
                "checkpoint": str(error.path),
                "exit_code": error.code,
            },
        }
    return {
        "error": None if error is None else {"type": type(error).__name__, "message": str(error)[:4000]},
        "stop": None,
    }


def _statuses(trainer: Trainer) -> list[Status]:
    own = getattr(trainer.strategy, "statuses", None)
    return own() if callable(own) else collect_statuses(trainer, [])
