"""Optimizers under the path that configuration files name: ``class_path:
lightning_fastft.optim.FusedAdamW``.
"""

from lightning_fastft.training.optimization.muon import MuonAdamW
from lightning_fastft.training.optimizer import FusedAdamW

__all__ = ["FusedAdamW", "MuonAdamW"]
