"""Register the strategy names that ``Trainer(strategy=...)`` accepts after ``import lightning_fastft``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy

_DESCRIPTIONS = (
    (FastFTStrategy, "Packed fine-tuning on one device"),
    (FastFTDDPStrategy, "Packed fine-tuning with a whole model on every device (DDP)"),
    (FastFTFSDPStrategy, "Packed fine-tuning with one model sharded over all devices (FSDP2)"),
)


def register_strategies() -> None:
    """Register our strategy names with Lightning; a second call does nothing.

    Example:
        >>> register_strategies()
        >>> {"fastft", "fastft_ddp", "fastft_fsdp"} <= set(StrategyRegistry.available_strategies())
        True
    """
    for strategy, description in _DESCRIPTIONS:
        if strategy.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(strategy.strategy_name, strategy, description=description)
