"""The compared systems and their settings, and the systems without a row."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """One mode of a system.

    Args:
        mode: The mode of an arm of the ruler.
        is_default: Whether it is the system's default; for ours, the shipped configs.
        needs: A module without which this mode does not run; empty for none.
    """

    mode: str
    is_default: bool = False
    needs: str = ""


class System(NamedTuple):
    """One system of the comparison.

    Args:
        arm: Its arm in benchmarks/ruler/arms; empty if there is none.
        modules: Modules that it imports.
        packages: Packages whose versions its rows name.
        pip: Command that installs it.
        settings: Its modes on a GPU.
        cpu_settings: Its modes on a CPU.
        why_no_cpu: Why it has no modes on a CPU.
        why_no_arm: Why it is not run.
    """

    arm: str
    modules: tuple[str, ...]
    pip: str
    packages: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    cpu_settings: tuple[Setting, ...] = ()
    why_no_cpu: str = ""
    why_no_arm: str = ""


class Conflict(NamedTuple):
    """Why a system does not run with the measured versions.

    Args:
        version: The examined version, the newest for Python 3.12.
        why: Its requirements that the measured versions do not meet.
    """

    version: str
    why: str


# Our optimizer for the one of the peers: moments in 8 bits are those of bitsandbytes' AdamW, and FusedAdamW's.
OUR_FORMS: Mapping[str, str] = {"adamw_8bit": "adamw_fused_8bit"}

# The versions of the measured rows, with which pip was asked to resolve the systems in CONFLICTS:
# pip install --dry-run --ignore-installed --target none --python-version 3.12 --only-binary=:all: torch==2.11.0 \
#     transformers==5.17.0 NAME==VERSION
CHECKED_AGAINST: Mapping[str, str] = {"python": "3.12", "torch": "2.11.0", "transformers": "5.17.0"}
# Systems without an arm, with the answer of pip or the error of their import.
CONFLICTS: Mapping[str, Conflict] = {
    "axolotl": Conflict(
        "0.21.0", "torch<2.15.0,>=2.13.0 and transformers==5.20.1 (0.20.0: transformers==5.17.0, torch>=2.13.0)"
    ),
    "llamafactory": Conflict("0.9.5", "transformers<=5.6.0, peft<=0.18.1, datasets<=4.0.0, trl<=0.24.0"),
    "ms-swift": Conflict(
        "4.6.0",
        "datasets<4.8.5, while ours needs datasets>=5.2; alone it resolves (Python 3.11), with trl 0.29.1 and peft 0.20.0, if oss2 may be built from source",
    ),
    "nemo-automodel": Conflict("0.7.0", "transformers==5.18.0 (0.6.0: transformers==5.12.1)"),
    "torchtune": Conflict("0.6.1", "its import fails beside torchao 0.18: No module named 'torchao.dtypes.nf4tensor'"),
}

# Applies to every loss of trl 1.15; Triton raises "0 active drivers".
_TRITON_LOSS = "its loss is a Triton kernel"
_TRL = ("trl", "torch", "transformers", "liger_kernel")

# In the order of the first pass; plain is first, because it writes the reference gradients.
SYSTEMS: Mapping[str, System] = {
    "plain": System(
        arm="plain",
        modules=("transformers", "peft"),
        pip="pip install transformers peft bitsandbytes",
        packages=("torch", "transformers", "peft", "bitsandbytes"),
        settings=(Setting("recompute", is_default=True), Setting("keep"), Setting("keep+liger", needs="liger_kernel")),
        cpu_settings=(Setting("recompute", is_default=True),),
    ),
    "ours": System(
        arm="ours",
        modules=("lightning_fastft",),
        pip="pip install -e '.[qlora]'",
        packages=("lightning_fastft", "torch", "transformers"),
        # The last one is that of the shipped configs, which keeps everything if it fits.
        settings=(
            Setting("keep+graphs"),
            Setting("recompute+graphs=auto"),
            Setting("auto+graphs=auto", is_default=True),
        ),
        # Plans need a device with limited memory: on a CPU "auto" keeps everything.
        cpu_settings=(Setting("keep", is_default=True),),
    ),
    "unsloth": System(
        arm="unsloth",
        modules=("unsloth", "trl"),
        pip="pip install unsloth",
        packages=("unsloth", "trl", "torch", "transformers"),
        settings=(Setting("unsloth", is_default=True), Setting("off"), Setting("skip-max")),
        why_no_cpu="its import refuses a machine without a GPU",
    ),
    "trl": System(
        arm="trl",
        modules=("trl",),
        pip="pip install trl",
        packages=_TRL,
        settings=(Setting("recompute", is_default=True),),
        why_no_cpu=_TRITON_LOSS,
    ),
    "trl+liger": System(
        arm="trl",
        modules=("trl", "liger_kernel"),
        pip="pip install trl liger-kernel",
        packages=_TRL,
        settings=(Setting("recompute+liger", is_default=True), Setting("keep+liger")),
        why_no_cpu=_TRITON_LOSS,
    ),
    **{
        name: System(arm="", modules=(), pip="", why_no_arm=f"{conflict.version}: {conflict.why}")
        for name, conflict in CONFLICTS.items()
    },
}
# Modules of benchmarks/ruler/arms that run a system, in the order of SYSTEMS.
ARMS = tuple(dict.fromkeys(system.arm for system in SYSTEMS.values() if system.arm))


def system_of(record: Mapping[str, Any]) -> str:
    """Return the system of the comparison to which a record of the ruler belongs.

    Example:
        >>> system_of({"system": "trl", "mode": "keep+liger"}), system_of({"system": "plain", "mode": "keep+liger"})
        ('trl+liger', 'plain')
    """
    is_liger = record["system"] == "trl" and "liger" in record["mode"]
    return "trl+liger" if is_liger else str(record["system"])


def settings_of(system: System, *, device: str) -> tuple[Setting, ...]:
    """Return the modes of a system on a device, "cuda" or "cpu"."""
    return system.settings if device == "cuda" else system.cpu_settings


def find_gap(system: System, *, device: str) -> str:
    """Return why a system cannot run on a device here, with the command that installs it; empty if it can.

    An import that fails later is reported by the process of the arm.
    """
    if not system.arm:
        return f"it has no arm: {system.why_no_arm}"
    if device == "cpu" and system.why_no_cpu:
        return f"it needs a GPU: {system.why_no_cpu}"
    packages = [module.partition(".")[0] for module in system.modules]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"ModuleNotFoundError: No module named {missing[0]!r}; {system.pip}" if missing else ""


def missing_module(setting: Setting) -> str:
    """Return a module that a setting needs and that is not installed; empty if there is none."""
    return setting.needs if setting.needs and importlib.util.find_spec(setting.needs) is None else ""
