import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_fastft.estimate.costs import model_costs
from lightning_fastft.estimate.machines import find_gpu
from tests.estimate.test_costs import EXPERTS, SMALL

PACKAGE = Path(__file__).parents[2] / "lightning_fastft"
HEAVY = ("transformers", "peft", "bitsandbytes", "triton", "datasets")
OPTIONAL = ("bitsandbytes", "jsonargparse", "cudnn", "matplotlib", "pyarrow", "rich", "triton")


def modules() -> list[str]:
    """Return the dotted names of all modules of the package, kernels/*/triton.py aside: those are triton."""
    files = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "triton.py")
    parts = [path.relative_to(PACKAGE.parent).with_suffix("").parts for path in files]
    return [".".join(part for part in names if part != "__init__") for names in parts if names[-1] != "__main__"]


# Each script runs in a fork of a fresh process that has loaded torch and Lightning, and nothing of ours.
FRESH = """
import json, os, sys
import torch, lightning.pytorch
sys.argv, scripts = sys.argv[:1] + sys.argv[2:], json.loads(sys.argv[1])
for name, script in scripts.items():
    child = os.fork()
    if child == 0:
        exec(script)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{name} failed")
"""
LIGHT = """
from lightning.pytorch.strategies import StrategyRegistry
before = set(sys.modules)
import lightning_fastft
added = {name.partition(".")[0] for name in set(sys.modules) - before}
is_registered = {"fastft", "fastft_ddp", "fastft_fsdp"} <= set(StrategyRegistry.available_strategies())
print(json.dumps({"light": [sorted(added), is_registered, torch.cuda.is_initialized()]}), flush=True)
"""
# Blocked after lightning, which asks for some of them itself.
WITHOUT_HEAVY = f"""
for name in list(sys.modules):
    if name.partition(".")[0] in {HEAVY}:
        del sys.modules[name]
for name in {HEAVY}:
    sys.modules[name] = None
import lightning_fastft
print(json.dumps({{"without heavy": len(lightning_fastft.__all__)}}), flush=True)
"""
WITHOUT_OPTIONAL = """
import importlib
import transformers, peft
blocked, names, nf4 = json.loads(sys.argv[1])
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
print(json.dumps({"without optional": failed}), flush=True)

from lightning_fastft.estimate.costs import model_costs
from lightning_fastft.estimate.meta_model import Swaps
options = {**nf4, "machine": importlib.import_module("lightning_fastft.estimate.machines").find_gpu("H200")}
found = [repr(model_costs(**options))]
try:
    model_costs(swaps=Swaps(is_fused=False), **options)
except ImportError as error:
    found.append(str(error))
print(json.dumps({"costs": found}), flush=True)
"""
# Arguments of the costs of a step on NF4 layers.
NF4_COSTS = {
    "model": {"model_type": "qwen3_moe", **SMALL, **EXPERTS},
    "num_tokens": 2048,
    "mean_document_tokens": 512,
    "quantization": "nf4",
    "lora": 4,
}


@pytest.fixture(scope="module")
def answers():
    """What the scripts found, by their names."""
    # The command line is made of jsonargparse; everything else does without.
    names = [name for name in modules() if not name.startswith("lightning_fastft.cli")]
    scripts = {"light": LIGHT, "without heavy": WITHOUT_HEAVY, "without optional": WITHOUT_OPTIONAL}
    command = [sys.executable, "-c", FRESH, json.dumps(scripts), json.dumps([OPTIONAL, names, NF4_COSTS])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: answer for line in lines for name, answer in line.items()}


@pytest.mark.slow
def test_import_of_the_package_is_light_and_registers_the_strategy(answers):
    # lightning.pytorch itself brings the top of transformers and triton along (through torchmetrics and torch): what
    # counts is what we add.
    added, is_registered, touched_device = answers["light"]
    assert not set(added) & set(HEAVY)
    assert set(added) - sys.stdlib_module_names == {"lightning_fastft"}
    assert is_registered
    assert not touched_device


@pytest.mark.slow
def test_import_of_the_package_needs_none_of_the_heavy_packages(answers):
    assert answers["without heavy"] > 0


@pytest.mark.slow
def test_every_module_imports_without_the_optional_packages(answers):
    assert answers["without optional"] == {}


@pytest.mark.slow
def test_fused_layers_on_nf4_cost_the_same_without_bitsandbytes(answers):
    pytest.importorskip("bitsandbytes")
    costs, refusal = answers["costs"]
    assert costs == repr(model_costs(**NF4_COSTS, machine=find_gpu("H200")))
    assert "lightning-fastft[qlora]" in refusal
