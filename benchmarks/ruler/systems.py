"""The compared systems, their settings, and the missing ones."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One mode of a system.

    Args:
        mode: As the ruler's arm reads it.
        is_default: What a user gets who chooses nothing; of ours, the shipped configs.
        needs: A module without which this mode does not run; empty for none.
    """

    mode: str
    is_default: bool = False
    needs: str = ""


class System(NamedTuple):
    """One system of the comparison.

    Args:
        arm: Its arm in benchmarks/ruler/arms; empty where there is none.
        modules: What it imports.
        pip: The line that installs it.
        settings: Its modes on a GPU.
        cpu_settings: Its modes on a CPU.
        why_no_arm: Why it is not run although it can be imported.
    """

    arm: str
    modules: tuple[str, ...]
    pip: str
    settings: tuple[Setting, ...] = ()
    cpu_settings: tuple[Setting, ...] = ()
    why_no_arm: str = ""


# Averages in 8 bits: bitsandbytes' AdamW at the peers, ours in its own one pass.
OUR_OPTIMIZERS: Mapping[str, str] = {"adamw_8bit": "adamw_fused_8bit"}

# In the order of the first pass; plain leads, because it leaves the reference gradients.
SYSTEMS: Mapping[str, System] = {
    "plain": System(
        arm="plain",
        modules=("transformers", "peft"),
        pip="pip install transformers peft bitsandbytes",
        settings=(Setting("recompute", is_default=True), Setting("keep"), Setting("keep+liger", needs="liger_kernel")),
        cpu_settings=(Setting("recompute", is_default=True),),
    ),
    "ours": System(
        arm="ours",
        modules=("lightning_fastft",),
        pip="pip install -e '.[qlora]'",
        # The last is what the shipped configs run; where everything fits, it keeps everything.
        settings=(
            Setting("keep+graphs"),
            Setting("recompute+graphs=auto"),
            Setting("auto+graphs=auto", is_default=True),
        ),
        # A plan needs a device whose memory runs out: on a CPU "auto" keeps everything.
        cpu_settings=(Setting("keep", is_default=True),),
    ),
    "unsloth": System(
        arm="unsloth",
        modules=("unsloth", "trl"),
        pip="pip install unsloth",
        settings=(Setting("unsloth", is_default=True), Setting("off"), Setting("skip-max")),
        cpu_settings=(Setting("unsloth", is_default=True),),
    ),
    "trl": System(
        arm="trl",
        modules=("trl",),
        pip="pip install trl",
        settings=(Setting("recompute", is_default=True),),
        cpu_settings=(Setting("recompute", is_default=True),),
    ),
    "trl+liger": System(
        arm="trl",
        modules=("trl", "liger_kernel"),
        pip="pip install trl liger-kernel",
        settings=(Setting("recompute+liger", is_default=True), Setting("keep+liger")),
        cpu_settings=(Setting("recompute+liger", is_default=True),),
    ),
    "torchtune": System(
        arm="",
        modules=("torchtune.training",),
        pip="pip install torchtune torchao",
        why_no_arm=(
            "its last release, 0.6.1, imports torchao.dtypes.nf4tensor, which torchao has taken out; beside an old "
            "torchao and an old torch it "
            "trains models of its own on weights of its own names, which no arm maps yet"
        ),
    ),
    "axolotl": System(
        arm="",
        modules=("axolotl",),
        pip="pip install axolotl",
        why_no_arm=(
            "release 0.19.0 pins transformers 5.16.1, older than what ours runs on, so both never share an "
            "environment; underneath it is the Trainer "
            "of transformers, which trl stands for"
        ),
    ),
}


def system_of(record: Mapping[str, Any]) -> str:
    """Return the system of the comparison that a record of the ruler belongs to.

    Example:
        >>> system_of({"system": "trl", "mode": "keep+liger"}), system_of({"system": "plain", "mode": "keep+liger"})
        ('trl+liger', 'plain')
    """
    is_liger = record["system"] == "trl" and "liger" in record["mode"]
    return "trl+liger" if is_liger else str(record["system"])


def settings_of(system: System, *, device: str) -> tuple[Setting, ...]:
    """Return the modes of a system on a device, "cuda" or "cpu"."""
    return system.settings if device == "cuda" else system.cpu_settings


def find_gap(system: System) -> str:
    """Return why a system cannot run here, with the line that installs it; empty when it can.

    The process of an arm says itself which import fails.
    """
    packages = [module.partition(".")[0] for module in system.modules]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        return f"ModuleNotFoundError: No module named {missing[0]!r}; {system.pip}"
    return "" if system.arm else f"it has no arm: {system.why_no_arm}"


def missing_module(setting: Setting) -> str:
    """Return the module that a setting needs and that is not installed; empty when there is none."""
    return setting.needs if setting.needs and importlib.util.find_spec(setting.needs) is None else ""
