import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_fastft"
HEAVY = ("transformers", "peft", "bitsandbytes", "triton", "datasets")
OPTIONAL = ("bitsandbytes", "jsonargparse", "cudnn", "matplotlib", "pyarrow", "rich", "triton")


def modules() -> list[str]:
    """Return the dotted names of all modules of the package, kernels/*/triton.py aside: those are triton."""
    files = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "triton.py")
    parts = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in files]
    return [".".join(part for part in names if part != "__init__") for names in parts if names[-1] != "__main__"]


def run(script: str, *args: str) -> str:
    """Run a script in a fresh process and return what it wrote last."""
    done = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
def test_import_of_the_package_is_light_and_registers_the_strategy():
    # lightning.pytorch itself brings the top of transformers and triton along (through torchmetrics and torch): what
    # counts is what we add.
    script = """
import json, sys
import torch, lightning.pytorch
from lightning.pytorch.strategies import StrategyRegistry
before = set(sys.modules)
import lightning_fastft
added = {name.partition(".")[0] for name in set(sys.modules) - before}
is_registered = {"fastft", "fastft_ddp", "fastft_fsdp"} <= set(StrategyRegistry.available_strategies())
print(json.dumps([sorted(added), is_registered, torch.cuda.is_initialized()]))
"""
    added, is_registered, touched_device = json.loads(run(script))
    assert not set(added) & set(HEAVY)
    assert set(added) - sys.stdlib_module_names == {"lightning_fastft"}
    assert is_registered
    assert not touched_device


@pytest.mark.slow
def test_import_of_the_package_needs_none_of_the_heavy_packages():
    # Blocked after lightning, which asks for some of them itself.
    script = f"""
import sys
import lightning.pytorch
for name in list(sys.modules):
    if name.partition(".")[0] in {HEAVY}:
        del sys.modules[name]
for name in {HEAVY}:
    sys.modules[name] = None
import lightning_fastft
print(len(lightning_fastft.__all__))
"""
    assert int(run(script)) > 0


@pytest.mark.slow
def test_every_module_imports_without_the_optional_packages():
    script = """
import importlib, json, sys
import torch, lightning.pytorch, transformers, peft
blocked, names = json.loads(sys.argv[1])
for name in list(sys.modules):
    if name.partition(".")[0] in blocked:
        del sys.modules[name]
for name in blocked:
    sys.modules[name] = None
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""
    # The command line is made of jsonargparse; everything else does without.
    names = [name for name in modules() if not name.startswith("lightning_fastft.cli")]
    assert json.loads(run(script, json.dumps([OPTIONAL, names]))) == {}
