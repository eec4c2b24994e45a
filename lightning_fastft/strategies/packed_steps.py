"""Install packed training for one run, and check that each packed step was read."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_fastft.activations.checkpointing import STATUS_NAME as ACTIVATIONS_STATUS
from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.checks import check_choice
from lightning_fastft.core.errors import ContextError, OptionError
from lightning_fastft.core.optimizer_twin import is_known, measure_state
from lightning_fastft.core.run_environment import RunEnvironment
from lightning_fastft.core.shards import local_values
from lightning_fastft.core.status import Status
from lightning_fastft.kernels.attention.op import BACKENDS
from lightning_fastft.packing.collate import PackedBatch
from lightning_fastft.packing.context import ONE_BY_ONE
from lightning_fastft.packing.loader import PackedLoader
from lightning_fastft.strategies.patching import callbacks_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch.optim import Optimizer

    from lightning_fastft.core.patcher import ModelPatcher


# Callbacks of Lightning that copy the module, and read and write its weights during and after the training.
AVERAGING = (WeightAveraging, StochasticWeightAveraging)

# Checks that attention read the packed batches of a step; see PackedSteps.begin.
CheckRead = Callable[..., None]


class PackedSteps:
    """Install packed training for one run and check its steps; used by the strategies and by PackedTraining.

    Args:
        attention: Backend of the packed attention, "auto" to choose by device and shapes, "one_by_one" to run the
            documents of a pack one at a time with the model's own attention.
        activations: Policy for activations; None keeps the models' own checkpointing.

    Raises:
        OptionError: attention names no backend, or activations is not an OffloadCheckpointing.
    """

    def __init__(self, *, attention: str, activations: OffloadCheckpointing | None) -> None:
        if activations is not None and not isinstance(activations, OffloadCheckpointing):
            raise OptionError(
                f"activations must be an OffloadCheckpointing, got {activations!r}; for example "
                "OffloadCheckpointing('recompute')."
            )
        self.attention = check_choice("attention", attention, ("auto", *BACKENDS, ONE_BY_ONE))
        self.activations = activations
        self.backends_used: Counter[str] = Counter()
        self._statuses: list[Status] = []
        self._layers: list[nn.Module] = []
        self._checks: tuple[Callable[[], Status | None], ...] = ()
        # Whether the swaps are in place.
        self.is_installed = False

    def install(self, module: nn.Module, patcher: ModelPatcher, environment: RunEnvironment | None = None) -> None:
        """Install on every transformers model inside module until the patcher is undone.

        A failure leaves the module unchanged.

        Raises:
            UnsupportedModelError: A family cannot be trained exactly on packs.
            OptionError: An option does not fit the model.
        """
        if self.is_installed:
            return
        if "transformers.modeling_utils" not in sys.modules:
            # Without a transformers model nothing is imported, because PEFT would import bitsandbytes.
            reason = f"{type(module).__name__} holds no transformers model"
            names = ("packed attention", "loss head", *([ACTIVATIONS_STATUS] if self.activations is not None else []))
            self._statuses = [Status(name, "inactive", reason) for name in names]
            return
        # Imported on first use: the strategies must be importable without transformers.
        from lightning_fastft.patches.packed import install_packed_training

        self.backends_used.clear()
        with patcher.stage():
            patcher.set_attribute(self, "is_installed", True)
            installation = install_packed_training(
                module,
                patcher,
                checkpointing=self.activations,
                environment=environment,
                attention=self.attention,
            )
            patcher.set_attribute(self, "_layers", installation.layers)
            patcher.set_attribute(self, "_checks", installation.checks)
        self._statuses = installation.statuses

    def check_documents(self) -> None:
        """Compare packed documents with the same documents alone, for families outside the tested list.

        This runs once per run, on every rank, when the model is on its device.

        Raises:
            UnsupportedModelError: The documents of a pack see each other.
        """
        checks, self._checks = self._checks, ()
        self._statuses += [status for check in checks if (status := check()) is not None]

    def place(self, device: torch.device) -> None:
        """Stream frozen weights if requested; called once the model is on its device."""
        if self.activations is not None:
            self.activations.place(device)

    def check_training_mode(self) -> None:
        """Refuse layers in evaluation mode that should recompute."""
        if self.activations is not None and self._layers:
            self.activations.check_training_mode(self._layers)

    def begin(self, batch: Any) -> CheckRead:
        """Prepare the packed batches inside a batch for one step; return its check, to be called after the forward.

        The check takes the module, and as ``where`` the name of the step. It raises a ContextError if no attention
        layer read the context of a packed batch that has labelled tokens, so that packed documents saw each other.

        Cost:
            Host integers only; no host sync.
        """
        batches = find_packed_batches(batch)
        if self.attention != "auto":
            for found in batches:
                found.context.attention_backend = self.attention
        # A loader that keeps its batches may return one twice, so only the reads of this step count.
        return functools.partial(self.check_read, batches, [found.context.reads.copy() for found in batches])

    def check_read(
        self, batches: list[PackedBatch], reads_before: list[Counter[str]], module: nn.Module, *, where: str
    ) -> None:
        """Raise a ContextError if no attention layer read one of several batches since ``reads_before``."""
        reads: Counter[str] = Counter()
        for batch, before in zip(batches, reads_before):
            reads += batch.context.reads - before
        self.backends_used.update(reads)
        if not reads and any(batch.context.num_labelled > 0 for batch in batches):
            raise ContextError(_unread_message(module, where=where))

    def statuses(self) -> list[Status]:
        """Return the statuses, with the attention backends that ran so far."""
        found = [self._current(status) for status in self._statuses]
        return found if self.activations is None else found + self.activations.memory_statuses()

    def _current(self, status: Status) -> Status:
        """Return a status of the installation as it is now."""
        if status.state == "active" and status.name.startswith("packed attention") and self.backends_used:
            return status._replace(reason=f"{status.reason}; ran: {', '.join(sorted(self.backends_used))}")
        if status.state == "active" and status.name.startswith(ACTIVATIONS_STATUS) and self.activations is not None:
            return self.activations.status(status.name)
        return status


def find_packed_batches(batch: Any) -> list[PackedBatch]:
    """Return the packed batches in a batch: itself, or the members of a list, tuple or mapping.

    Example:
        >>> find_packed_batches({"input_ids": 1})
        []
    """
    if isinstance(batch, PackedBatch):
        return [batch]
    members: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        members = batch.values()
    elif isinstance(batch, (list, tuple)):
        members = batch
    return [member for member in members if isinstance(member, PackedBatch)]


def is_planned(batch: Any) -> bool:
    """Return whether the loss of a batch is divided for its own accumulation window, as a PackedDataModule plans it.

    A window that ``limit_train_batches`` cuts has fewer micro-batches, and the loss of each is larger for that.
    """
    return any(found.index >= 0 for found in find_packed_batches(batch))


def check_loaders(trainer: Trainer) -> None:
    """Check that the training micro-batches are planned for this Trainer; called in ``on_train_start``.

    Raises:
        OptionError: A loader of a DataModule was given without it, so that its plan knows no ranks, no accumulation
            and no position.
    """
    for loader in CombinedLoader(trainer.train_dataloader).flattened:
        if isinstance(loader, PackedLoader) and loader.find_run() is not trainer:
            raise OptionError(
                "A training loader of a PackedDataModule was given to the Trainer without its DataModule: it knows no "
                "ranks and no accumulate_grad_batches, and later epochs would lack micro-batches. Use "
                "trainer.fit(model, datamodule=data); inside a DataModule of your own set data.trainer = self.trainer "
                "before data.setup(stage)."
            )


def collect_statuses(trainer: Trainer, own: list[Status]) -> list[Status]:
    """Return own statuses, those of the LightningModule (``statuses()``) and those of the callbacks (``status()``)."""
    found = list(own)
    from_module: Callable[[], list[Status]] | None = getattr(trainer.lightning_module, "statuses", None)
    if callable(from_module):
        found += from_module()
    for callback in callbacks_of(trainer):
        from_callback = getattr(callback, "status", None)
        if callable(from_callback):
            status = from_callback()
            found += [status] if isinstance(status, Status) else list(status)
    return found


def environment_of(trainer: Trainer) -> RunEnvironment:
    """Return the RunEnvironment of a Trainer's run; the optimizers may be created later."""
    longest_pack = getattr(getattr(trainer, "datamodule", None), "max_tokens", 0)
    num_parts = getattr(trainer.strategy, "context_parallel", 1)
    return RunEnvironment(
        report=rank_zero_info,
        agree=getattr(trainer.strategy, "agree", trainer.strategy.broadcast),
        plans_together=num_parts > 1 or getattr(trainer.strategy, "expert_parallel", 1) > 1,
        num_local_ranks=trainer.num_devices,
        longest_pack=-(-longest_pack // num_parts) if isinstance(longest_pack, int) else 0,
        missing_bytes=lambda: missing_optimizer_bytes(trainer.optimizers),
        averaging=next((type(each).__name__ for each in callbacks_of(trainer) if isinstance(each, AVERAGING)), ""),
    )


def missing_optimizer_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of device memory that the first step will allocate for the state of optimizers.

    An optimizer with a method ``state_bytes`` returns its own number. One of PyTorch or bitsandbytes makes a step on
    the meta device. Others count as two moments in the dtype of each trained parameter.
    """
    return sum(map(_missing_bytes, optimizers))


def _missing_bytes(optimizer: Optimizer) -> int:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if all(map(optimizer.state.get, parameters)):
        return 0
    # FusedAdamW is in a folder that strategies do not import, so they detect it by this method.
    own_count = getattr(optimizer, "state_bytes", None)
    if callable(own_count):
        sizes = list(map(own_count, parameters))
    elif is_known(optimizer) and (state := measure_state(optimizer)) is not None:
        sizes = [each.device for each in state]
    else:
        sizes = [2 * local_values(parameter).nbytes for parameter in parameters]
    return sum(size for size, parameter in zip(sizes, parameters) if not optimizer.state.get(parameter))


def _unread_message(module: nn.Module, *, where: str) -> str:
    from lightning_fastft.patches.packed import describe_models

    models = describe_models(module)
    held = "; ".join(models) if models else f"no transformers model ({type(module).__name__} has other modules)"
    return (
        f"No attention layer read the context of the packed batch in {where} of {type(module).__name__}: its documents "
        f"saw each other, and training on them would be silently wrong. The module holds: {held}. Pass the whole batch "
        'to the model (self.model(**batch)), and use packed attention: Trainer(strategy="fastft"), or '
        "Trainer(callbacks=[PackedTraining()]) under another strategy, or "
        'attn_implementation="fastft" if the model is loaded after set-up (call lightning_fastft.register() before).'
    )
