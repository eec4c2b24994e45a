"""EvaluatedCausalLM: a SavedCausalLM that logs means over the batches of validation and test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from lightning_fastft.checkpoint.lightning_internals import drop_step_value
from lightning_fastft.training.metrics import TokenMean
from lightning_fastft.training.model.saved import SavedCausalLM

# In place of the number of a loader: all loaders.
_ALL = "all"


class EvaluatedCausalLM(SavedCausalLM):
    """Log metrics of validation and test under their names, such as ``val_loss``.

    Loaders in a mapping, as ``PackedDataModule(val_paths={"math": ..., "chat": ...})`` gives them, are each logged
    under their names, as ``val_loss/math``, and ``val_loss`` is then the mean over the items of all loaders.
    It is logged at the end: a subclass with its own ``on_validation_epoch_end`` calls the one of this class.

    Args:
        args: Of ``SavedCausalLM``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Metrics by name, for each loader, by "val" or "test" and its number.
        self.token_metrics = nn.ModuleDict()
        self._loader = 0
        # Names of means that are logged at the end, of the loaders whose batches have any item.
        self._partial: set[str] = set()

    def on_validation_epoch_end(self) -> None:
        """Log the means over some of the items, and the metrics over all named loaders."""
        self._log_partial("val")
        self._log_overall("val")

    def on_test_epoch_end(self) -> None:
        """Log the means over some of the items, and the metrics over all named loaders."""
        self._log_partial("test")
        self._log_overall("test")

    def _begin_evaluation(self, prefix: str, *, batch_idx: int, dataloader_idx: int) -> None:
        """Note the loader of a batch; with its first batch its means begin, and with the first loader those of all."""
        self._loader = dataloader_idx
        if batch_idx:
            return
        # Lightning resets what it has logged itself, and not the sums of an interrupted run of another Trainer.
        for key in (f"{prefix}_{dataloader_idx}", *([] if dataloader_idx else [f"{prefix}_{_ALL}"])):
            if key in self.token_metrics:
                for metric in cast("nn.ModuleDict", self.token_metrics[key]).values():
                    cast("TokenMean", metric).reset()

    def _log_sums(self, kind: type[TokenMean], name: str, *, prefix: str, total: Any, num_tokens: Any) -> None:
        """Add sums over labelled tokens to a metric of the present loader, and log it."""
        metric, attribute = self._add(kind, name, prefix=prefix, loader=self._loader, total=total, count=num_tokens)
        ending = self._ending(prefix)
        self.log(
            f"{prefix}_{name}{ending}",
            metric,
            metric_attribute=attribute,
            on_step=False,
            on_epoch=True,
            prog_bar=not ending,
            add_dataloader_idx=not ending,
        )
        if ending:
            self._add(kind, name, prefix=prefix, loader=_ALL, total=total, count=num_tokens)

    def _log_means(self, means: Mapping[str, torch.Tensor], *, prefix: str, count: int, shown: tuple[str, ...]) -> None:
        """Log means over ``count`` examples of one batch: at each step in training, over all batches elsewhere.

        A training batch without examples, such as a pack that only fills an accumulation window, has no mean.
        """
        is_training = prefix == "train"
        if is_training and not count:
            for name in means if self._trainer is not None else ():
                drop_step_value(self.trainer, f"{prefix}_{name}")
            return
        ending = "" if is_training else self._ending(prefix)
        for name, value in means.items():
            self.log(
                f"{prefix}_{name}{ending}",
                value,
                on_step=is_training,
                on_epoch=not is_training,
                sync_dist=not is_training,
                # A bar of Lightning would read a training value at every step, with a host sync.
                prog_bar=name in shown and not is_training and not ending,
                # Lightning averages the weights of ranks, and would round an average of integers.
                batch_size=float(count),  # type: ignore[arg-type]
                add_dataloader_idx=not ending,
            )
            if ending:
                self._add(TokenMean, name, prefix=prefix, loader=_ALL, total=value.detach() * count, count=count)

    def _log_partial_mean(self, name: str, value: torch.Tensor, *, prefix: str, count: int) -> None:
        """Log a mean over those ``count`` examples of one batch that it is about, and not where no batch has any.

        All ranks must call this for the same names in a validation or test.
        """
        if prefix == "train":
            self._log_means({name: value}, prefix=prefix, count=count, shown=())
            return
        self._partial.add(name)
        loaders: list[int | str] = [self._loader, *([_ALL] if self._ending(prefix) else [])]
        for loader in loaders:
            self._add(TokenMean, name, prefix=prefix, loader=loader, total=value.detach() * count, count=count)

    def _add(
        self, kind: type[TokenMean], name: str, *, prefix: str, loader: int | str, total: Any, count: Any
    ) -> tuple[TokenMean, str]:
        """Add to a metric, which is made at its first batch; return it with its place in this module."""
        key = f"{prefix}_{loader}"
        if key not in self.token_metrics:
            self.token_metrics[key] = nn.ModuleDict()
        metrics = cast("nn.ModuleDict", self.token_metrics[key])
        if name not in metrics:
            metrics[name] = kind().to(self.device)
        metric = cast("TokenMean", metrics[name])
        metric.update(total, num_tokens=count)
        return metric, f"token_metrics.{key}.{name}"

    def _log_partial(self, prefix: str) -> None:
        """Log the means over some of the items: of each loader, and of all named ones.

        Cost:
            A host sync and an all-reduce for each.
        """
        names = self._loader_names(prefix)
        endings = {f"{prefix}_{place}": f"/{name}" for place, name in enumerate(names)}
        for key, ending in {**endings, f"{prefix}_{_ALL if names else 0}": ""}.items():
            for name, metric in self._metrics_of(key):
                if name in self._partial and self.trainer.strategy.reduce(metric.num_tokens.clone(), reduce_op="sum"):
                    self._log_at_end(f"{prefix}_{name}{ending}", metric, key=key, name=name, is_shown=False)

    def _log_overall(self, prefix: str) -> None:
        """Log the metrics over all loaders, which Lightning does for single loaders alone."""
        if self._loader_names(prefix):
            key = f"{prefix}_{_ALL}"
            for name, metric in self._metrics_of(key):
                if name not in self._partial:
                    self._log_at_end(f"{prefix}_{name}", metric, key=key, name=name, is_shown=True)

    def _metrics_of(self, key: str) -> list[tuple[str, TokenMean]]:
        """Return the metrics of a loader by name."""
        if key not in self.token_metrics:
            return []
        return [
            (name, cast("TokenMean", metric)) for name, metric in cast("nn.ModuleDict", self.token_metrics[key]).items()
        ]

    def _log_at_end(self, logged: str, metric: TokenMean, *, key: str, name: str, is_shown: bool) -> None:
        attribute = f"token_metrics.{key}.{name}"
        self.log(logged, metric, metric_attribute=attribute, on_step=False, on_epoch=True, prog_bar=is_shown)

    def _ending(self, prefix: str) -> str:
        """Return what the names of metrics of the present loader end with."""
        names = self._loader_names(prefix)
        return f"/{names[self._loader]}" if names else ""

    def _loader_names(self, prefix: str) -> list[str]:
        """Return the names of the loaders of validation or test; empty if they have none."""
        if self._trainer is None:
            return []
        loaders = self.trainer.test_dataloaders if prefix == "test" else self.trainer.val_dataloaders
        return [*loaders] if isinstance(loaders, Mapping) else []

    def _with_loader_names(self, names: frozenset[str]) -> frozenset[str]:
        """Return names of logged metrics with those of each named validation loader."""
        endings = self._loader_names("val")
        return names | {f"{name}/{ending}" for name in names if name.startswith("val_") for ending in endings}
