"""The strategy names that ``Trainer(strategy=...)`` knows after ``import lightning_fastft``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_fastft.strategies.single_device import FastFTStrategy


def register_strategies() -> None:
    """Register our strategy names with Lightning; a second call does nothing.

    Example:
        >>> register_strategies()
        >>> "fastft" in StrategyRegistry.available_strategies()
        True
    """
    if FastFTStrategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(FastFTStrategy.strategy_name, FastFTStrategy, description="Packed fine-tuning on one device")
