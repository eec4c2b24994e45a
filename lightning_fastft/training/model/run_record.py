"""Describe a run in plain values for its checkpoints: data, steps, final figures and versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_fastft.core.extras import version_of
from lightning_fastft.training.datamodule import PackedDataModule

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Key of a checkpoint.
RUN_KEY = "fastft_run"
_PACKAGES = ("lightning_fastft", "torch", "lightning", "transformers", "peft", "bitsandbytes")


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """Return what a model card says of a run, as a checkpoint keeps it.

    Cost:
        Copies the logged values to the host, as ModelCheckpoint does.
    """
    return {
        "data": _describe_data(getattr(trainer, "datamodule", None)),
        "epochs": int(trainer.current_epoch) + 1,
        "optimizer_steps": int(trainer.global_step),
        "packs_per_step": int(trainer.accumulate_grad_batches) * int(trainer.world_size),
        "figures": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "versions": find_versions(),
    }


def find_versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a run computes; of those that are installed."""
    return {name: found for name in _PACKAGES if (found := version_of(name))}


def _describe_data(data: Any) -> dict[str, Any]:
    """Return files, rows, examples and tokens of a PackedDataModule, the numbers of a RolloutDataModule, and nothing of
    another data module.
    """
    # Of a RolloutDataModule, which imports the tuners.
    rollouts = getattr(data, "rollout_facts", None)
    if rollouts is not None:
        return {"max_tokens": data.max_tokens, "rollouts": rollouts}
    if not isinstance(data, PackedDataModule):
        return {}
    found: dict[str, Any] = {"max_tokens": data.max_tokens}
    for split in ("train", "val"):
        report, subset = data.report(split), data.subset(split)
        if subset is not None:
            found[split] = {
                "rows_per_source": {} if report is None else dict(report.rows_per_source),
                "examples": len(subset),
                "tokens": int(subset.length_N.sum()),
            }
    return found
