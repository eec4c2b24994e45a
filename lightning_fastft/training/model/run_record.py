"""Describe a run in plain values for its checkpoints: data, steps, final figures and versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_fastft.core.extras import version_of
from lightning_fastft.packing.tokens.chat import read_template
from lightning_fastft.training.datamodule import PackedDataModule

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# Key of a checkpoint.
RUN_KEY = "fastft_run"
# Options of the data in the description of a run.
_TEMPLATE, _VARIABLES = "chat_template", "chat_template_kwargs"
_PACKAGES = ("lightning_fastft", "torch", "lightning", "transformers", "peft", "bitsandbytes")


def describe_run(trainer: Trainer) -> dict[str, Any]:
    """Return what a model card says of a run, as a checkpoint keeps it.

    Cost:
        Copies the logged values to the host, as ModelCheckpoint does.
    """
    return {
        "tuner": type(trainer.lightning_module).__name__,
        "data": _describe_data(getattr(trainer, "datamodule", None)),
        "answer_end": getattr(trainer.lightning_module, "answer_end", None),
        "epochs": int(trainer.current_epoch) + 1,
        "optimizer_steps": int(trainer.global_step),
        "packs_per_step": int(trainer.accumulate_grad_batches) * int(trainer.world_size),
        "figures": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "versions": find_versions(),
    }


def warn_of_other_tuner(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Warn if a checkpoint is validated, tested or resumed by another class than that of its training or a subclass.

    Args:
        trainer: That of the run that loads the checkpoint.
        saved: What ``describe_run`` returned in the run of the checkpoint; empty if that is not known.
    """
    trained, present = saved.get("tuner"), type(trainer.lightning_module)
    is_same = trained is None or trained in {base.__name__ for base in present.__mro__}
    if not is_same and trainer.state.fn != TrainerFn.PREDICTING:
        rank_zero_warn(
            f"The checkpoint was trained with {trained} and is loaded into {present.__name__}, whose loss and metrics "
            f"are those of another method. For those of its training give that class and its data: --model {trained}"
        )


def warn_of_other_template(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Warn if the data of a run is read with another chat template, or other variables of it, than its checkpoint's.

    Args:
        trainer: That of the run that loads the checkpoint.
        saved: What ``describe_run`` returned in the run of the checkpoint; empty if that is not known.
    """
    data, trained = getattr(trainer, "datamodule", None), saved.get("data")
    if not trained or not isinstance(data, PackedDataModule) or data.tokenizer is None:
        return
    own, present = read_template(data.tokenizer, None), read_template(data.trained_tokenizer, None)
    changes = [f"another {_TEMPLATE}"] if trained.get(_TEMPLATE, own) != present else []
    variables = trained.get(_VARIABLES, {})
    if variables != data.chat_template_kwargs:
        changes.append(f"{_VARIABLES}={variables!r} instead of {data.chat_template_kwargs!r}")
    if changes:
        rank_zero_warn(
            f"The checkpoint was trained with {' and '.join(changes)}: its conversations had other tokens than those "
            "of this run. For the same tokens give the options of its training, --data.chat_template and "
            "--data.chat_template_kwargs."
        )


def find_versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a run computes; of those that are installed."""
    return {name: found for name in _PACKAGES if (found := version_of(name))}


def _describe_data(data: Any) -> dict[str, Any]:
    """Return files, rows, examples and tokens of a PackedDataModule, the numbers of a RolloutDataModule, and nothing of
    another data module.
    """
    # Of a RolloutDataModule, which imports the tuners.
    rollouts = getattr(data, "rollout_facts", None)
    given = getattr(data, _VARIABLES, None)
    variables = {_VARIABLES: given} if given else {}
    if rollouts is not None:
        return {"max_tokens": data.max_tokens, "rollouts": rollouts, **variables}
    if not isinstance(data, PackedDataModule):
        return {}
    found: dict[str, Any] = {"max_tokens": data.max_tokens, **variables}
    if data.options.chat_template is not None and data.trained_tokenizer is not None:
        # The text, because its file may change after the training.
        found[_TEMPLATE] = data.trained_tokenizer.chat_template
    for split in ("train", "val"):
        report, subset = data.report(split), data.subset(split)
        if subset is not None:
            found[split] = {
                "rows_per_source": {} if report is None else dict(report.rows_per_source),
                "examples": len(subset),
                "tokens": int(subset.length_N.sum()),
            }
    return found
