"""Fine-tune Hugging Face causal language models with PyTorch Lightning at the limit of the GPU.

Importing this package registers its strategy names with Lightning and loads nothing heavier than torch and
lightning.pytorch; each name of the public list is loaded when it is first used.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_fastft.activations.checkpointing import OffloadCheckpointing as OffloadCheckpointing
    from lightning_fastft.callbacks.bincount_router import BincountRouter as BincountRouter
    from lightning_fastft.callbacks.finite_guard import FiniteGuard as FiniteGuard
    from lightning_fastft.callbacks.fused_kernels import FusedKernels as FusedKernels
    from lightning_fastft.callbacks.gradient_health import GradientHealth as GradientHealth
    from lightning_fastft.callbacks.packed_training import PackedTraining as PackedTraining
    from lightning_fastft.callbacks.watchdog import Watchdog as Watchdog
    from lightning_fastft.checkpoint.io import VerifiedCheckpointIO as VerifiedCheckpointIO
    from lightning_fastft.checkpoint.resume import ExactResume as ExactResume
    from lightning_fastft.core.errors import FastFTError as FastFTError
    from lightning_fastft.core.status import Status as Status
    from lightning_fastft.monitor.generate_samples import GenerateSamples as GenerateSamples
    from lightning_fastft.monitor.host_waits import HostWaitDetector as HostWaitDetector
    from lightning_fastft.monitor.progress_bar import FastFTProgressBar as FastFTProgressBar
    from lightning_fastft.monitor.run_report import RunReport as RunReport
    from lightning_fastft.monitor.token_throughput import TokenThroughput as TokenThroughput
    from lightning_fastft.packing.collate import Document as Document
    from lightning_fastft.packing.collate import PackedBatch as PackedBatch
    from lightning_fastft.packing.collate import collate as collate
    from lightning_fastft.packing.context import BatchContext as BatchContext
    from lightning_fastft.strategies.ddp import FastFTDDPStrategy as FastFTDDPStrategy
    from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy as FastFTFSDPStrategy
    from lightning_fastft.strategies.single_device import FastFTStrategy as FastFTStrategy
    from lightning_fastft.training.datamodule import PackedDataModule as PackedDataModule
    from lightning_fastft.training.distillation import DistillationTuner as DistillationTuner
    from lightning_fastft.training.fine_tuner import FineTuner as FineTuner
    from lightning_fastft.training.policy import PolicyTuner as PolicyTuner
    from lightning_fastft.training.preference import PreferenceTuner as PreferenceTuner
    from lightning_fastft.training.registration import register as register
    from lightning_fastft.training.reward import RewardTuner as RewardTuner
    from lightning_fastft.training.rollouts import RolloutDataModule as RolloutDataModule

__version__ = "0.1.0"

# The public list, and where each name lives. Type checkers read the imports above in its place; tests/meta compares
# both, and the list with its stored copy.
_PLACES = {
    "BatchContext": "packing.context",
    "BincountRouter": "callbacks.bincount_router",
    "DistillationTuner": "training.distillation",
    "Document": "packing.collate",
    "ExactResume": "checkpoint.resume",
    "FastFTDDPStrategy": "strategies.ddp",
    "FastFTError": "core.errors",
    "FastFTFSDPStrategy": "strategies.fsdp2",
    "FastFTProgressBar": "monitor.progress_bar",
    "FastFTStrategy": "strategies.single_device",
    "FineTuner": "training.fine_tuner",
    "FiniteGuard": "callbacks.finite_guard",
    "FusedKernels": "callbacks.fused_kernels",
    "GenerateSamples": "monitor.generate_samples",
    "GradientHealth": "callbacks.gradient_health",
    "HostWaitDetector": "monitor.host_waits",
    "OffloadCheckpointing": "activations.checkpointing",
    "PackedBatch": "packing.collate",
    "PackedDataModule": "training.datamodule",
    "PackedTraining": "callbacks.packed_training",
    "PolicyTuner": "training.policy",
    "PreferenceTuner": "training.preference",
    "RewardTuner": "training.reward",
    "RolloutDataModule": "training.rollouts",
    "RunReport": "monitor.run_report",
    "Status": "core.status",
    "TokenThroughput": "monitor.token_throughput",
    "VerifiedCheckpointIO": "checkpoint.io",
    "Watchdog": "callbacks.watchdog",
    "collate": "packing.collate",
    "register": "training.registration",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> object:
    """Load a public name on first use."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted({*globals(), *__all__})


def _is_command() -> bool:
    """Return whether this process is ``fastft`` or ``python -m lightning_fastft``."""
    program = sys.argv[0] if sys.argv else ""
    # Python sets "-m" until it has found the module to run.
    is_module = program == "-m" and ("-m", __name__) in zip(sys.orig_argv, sys.orig_argv[1:])
    return is_module or Path(program).name in ("fastft", "fastft.exe")


# The command answers mistakes without torch; FastFTCLI registers the names.
if not _is_command():
    from lightning_fastft.strategies.registry import register_strategies

    register_strategies()
