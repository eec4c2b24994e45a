"""FastFTStrategy: packed training on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_fastft.core.errors import OptionError
from lightning_fastft.strategies.launchers import refuse_several_processes
from lightning_fastft.strategies.mixin import FastFTStrategyMixin

if TYPE_CHECKING:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    from lightning_fastft.activations.checkpointing import OffloadCheckpointing


class FastFTStrategy(FastFTStrategyMixin, SingleDeviceStrategy):
    """Train on one GPU (or on the CPU) with packed attention, logits of labelled rows only, and planned activations.

    The Trainer chooses the device: ``Trainer(strategy="fastft")`` uses the first GPU if there is one, ``devices=[1]``
    the second.

    Args:
        activations: Policy for activations between forward and backward; None is ``OffloadCheckpointing("auto")``.
        attention: Backend of the packed attention; "auto" chooses by device, head shape and longest document.
            "one_by_one" runs the documents of a pack one at a time with the model's own attention: exact for every
            family, and slow.
        exact_resume: Whether to add ExactResume if the Trainer has none. It saves random states in checkpoints, and a
            checkpoint after a signal.
        accelerator: As in Lightning.
        checkpoint_io: As in Lightning.
        precision_plugin: As in Lightning.

    Raises:
        OptionError: The Trainer was given more than one device, or a launcher (torchrun, srun, mpirun) started several.

    Example:
        >>> FastFTStrategy().statuses()
        []
    """

    strategy_name = "fastft"

    def __init__(
        self,
        *,
        activations: OffloadCheckpointing | None = None,
        attention: str = "auto",
        exact_resume: bool = True,
        accelerator: Accelerator | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            activations=activations,
            attention=attention,
            exact_resume=exact_resume,
            accelerator=accelerator,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._parallel_devices: list[torch.device] | None = None

    def setup_environment(self) -> None:
        """Refuse a job of several processes, then as the other strategies."""
        refuse_several_processes(self)
        super().setup_environment()

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device that the Trainer chose; None before the choice.

        Lightning assigns this attribute if a strategy has it. It passes the device to a registered single-device
        strategy in no other way.
        """
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and len(devices) > 1:
            raise OptionError(
                f"The strategy 'fastft' trains on one device, but the Trainer was given {len(devices)} "
                f"({', '.join(map(str, devices))}). Set devices=1, or use "
                'Trainer(strategy="fastft_ddp") for a whole model on each device, or '
                'Trainer(strategy="fastft_fsdp") for one model sharded over all devices.'
            )
        self._parallel_devices = devices
        if devices:
            self._root_device = devices[0]
