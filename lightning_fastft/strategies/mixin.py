"""The mixin that makes a Lightning strategy install packed training and own the activation policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fastft.offload.checkpointing import OffloadCheckpointing
from lightning_fastft.status import Status, render_status_table
from lightning_fastft.strategies.packed_steps import PackedSteps, collect_statuses, connect_activations

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.utilities.types import STEP_OUTPUT

    _Base = Strategy
else:
    _Base = object


class FastFTStrategyMixin(_Base):
    """Install packed training in ``setup``, judge every packed step before its backward, undo everything in ``teardown``.

    A strategy instance belongs to one Trainer (Lightning refuses a second one); it holds no device object before ``setup`` and can be pickled until
    then.

    Args:
        activations: What happens to activations between forward and backward; None is ``OffloadCheckpointing("auto")``.
        attention: Backend of the packed attention; "auto" chooses by device, head shape and longest document.
        **kwargs: What the strategy underneath takes.

    Raises:
        OptionError: activations is no OffloadCheckpointing, or attention names no backend.
    """

    def __init__(self, *, activations: OffloadCheckpointing | None = None, attention: str = "auto", **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(**kwargs)
        self.checkpointing = activations if activations is not None else OffloadCheckpointing("auto")
        self.packed_steps = PackedSteps(attention=attention, activations=self.checkpointing)
        self._fastft_trainer: pl.Trainer | None = None
        self._has_logged_backends = False

    def setup(self, trainer: pl.Trainer) -> None:
        """Install packed training on the built model, then set up the strategy underneath."""
        self._fastft_trainer = trainer
        self._has_logged_backends = False
        assert self.lightning_module is not None
        connect_activations(self.checkpointing, trainer)
        self.packed_steps.install(self.lightning_module)
        super().setup(trainer)
        self.packed_steps.place(self.root_device)

    def teardown(self) -> None:
        """Take every swap back, also after an exception, then tear down the strategy underneath."""
        self.packed_steps.undo()
        super().teardown()

    def on_train_start(self) -> None:
        """Log what is active, once the model is placed and before the first training batch."""
        super().on_train_start()
        self.packed_steps.check_training_mode()
        rank_zero_info("\n" + render_status_table(self.statuses()))

    def statuses(self) -> list[Status]:
        """Return what is active and why not: attention, loss head, activations, then what the module and the callbacks report."""
        own = self.packed_steps.statuses()
        return own if self._fastft_trainer is None else collect_statuses(self._fastft_trainer, own)

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:  # noqa: ANN401 - as Lightning's
        """Run the step, and refuse it before the backward if no attention layer read the packed batch."""
        output = self._run_or_step_down(super().training_step, *args, **kwargs)
        if not self._has_logged_backends and self.packed_steps.backends_used:
            self._has_logged_backends = True
            rank_zero_info("packed attention ran on: " + ", ".join(sorted(self.packed_steps.backends_used)))
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:  # noqa: ANN401 - as Lightning's
        """Run the step, and refuse it if no attention layer read the packed batch."""
        return self._judged_step(super().validation_step, "validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:  # noqa: ANN401 - as Lightning's
        """Run the step, and refuse it if no attention layer read the packed batch."""
        return self._judged_step(super().test_step, "test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Lightning's
        """Run the step, and refuse it if no attention layer read the packed batch."""
        return self._judged_step(super().predict_step, "predict_step", *args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - as Lightning's
        """Run the backward; say what to do where it runs out of memory.

        Raises:
            OutOfMemoryError: With the options to start again with in its message.
        """
        try:
            return super().backward(closure_loss, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            advice = self.checkpointing.advice()
            if advice is None:
                raise
            raise torch.OutOfMemoryError(
                f"The backward ran out of memory. Gradients may be half done, so the step cannot be repeated: start again with {advice}. ({error})"
            ) from error

    def _run_or_step_down(self, run_step: Callable[..., STEP_OUTPUT], *args: Any, **kwargs: Any) -> STEP_OUTPUT:  # noqa: ANN401
        """Run the step; where its forward runs out of memory, stream weights or plan for a tenth less, and run it once more."""
        try:
            return self._judged_step(run_step, "training_step", *args, **kwargs)
        except torch.OutOfMemoryError as error:
            # Ranks that wait for each other inside a forward cannot repeat theirs alone.
            if not isinstance(self, SingleDeviceStrategy) or self.checkpointing.advice() is None:
                raise
            reason = str(error).partition("\n")[0]
        # Only here, where the error and the activations that its frames held are gone.
        if not self.checkpointing.step_down():
            advice = self.checkpointing.advice()
            hint = f" Start again with {advice}." if advice else ""
            raise torch.OutOfMemoryError(f"The forward ran out of memory, and no smaller plan fits.{hint} ({reason})")
        rank_zero_warn(f"The forward ran out of memory and is repeated with less: {reason}")
        return self._judged_step(run_step, "training_step", *args, **kwargs)

    def _judged_step(self, run_step: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - as Lightning's
        batch = args[0] if args else next(iter(kwargs.values()), None)
        step = self.packed_steps.begin(batch)
        output = run_step(*args, **kwargs)
        # A training step that returns nothing is skipped by Lightning: no backward, nothing learned.
        if name != "training_step" or output is not None:
            assert self.lightning_module is not None
            step.check_read(self.lightning_module, where=name)
        return output
