"""FusedAdamW on two ranks, on sharded parameters: ``-m tests.training.optimization.shards_worker <folder>``; rank 0
writes what it found to ``<folder>/found.pt``.
"""

import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_fastft.checkpoint.folders import load_folder, save_folder
from lightning_fastft.core.errors import OptionError, ResumeError
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.host_waits import count_host_waits

# Rows that divide unevenly over two ranks, one row, none, a vector; in 8 bits: rows of one and of two blocks, and rows
# that are not whole blocks.
SHAPES = ((5, 3), (1, 4), (0, 4), (7,), (33, 256), (8, 512), (600, 16))
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.1}
MAX_NORM = 0.5
SKIPPED_STEP, NUM_STEPS = 2, 4
CASES = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "masters": {"dtype": torch.bfloat16, "master_weights": True},
    "8 bits": {"optim_bits": 8},
    "8 bits, masters": {"dtype": torch.bfloat16, "master_weights": True, "optim_bits": 8},
}
# One copy on both ranks, and a whole copy on each.
MESHES = {"shards": ((2,), ("shard",)), "copies": ((2, 1), ("replicate", "shard"))}


def values_of(step, dtype):
    """The same numbers on all ranks, whole, for each parameter; step 0 is the start."""
    generator = torch.Generator().manual_seed(step)
    return [
        (torch.randn(shape, generator=generator) * 10.0 ** (index % 3 - 1)).to(dtype)
        for index, shape in enumerate(SHAPES)
    ]


def run_steps(optimizer, params, dtype, *, share=lambda tensor: tensor):
    """Clipped steps, of which the guard skips one; the norms of the gradients."""
    norms = []
    optimizer.attach_guard(lambda norm: (~torch.isfinite(norm)).float())
    for step in range(1, NUM_STEPS + 1):
        for index, (param, grad) in enumerate(zip(params, values_of(step, dtype))):
            if step == SKIPPED_STEP and index == 0:
                # In the shard of the last rank.
                grad[-1] = float("nan")
            param.grad = share(grad)
        norms.append(optimizer.clip_next(MAX_NORM))
        optimizer.step()
    return torch.stack(norms)


def state_of(optimizer, params):
    """Whole values and state by parameter and name."""
    numbered = optimizer.state_dict()["state"]
    found = {}
    for number, param in enumerate(params):
        tensors = {"param": param.detach(), **numbered[number]}
        for name, tensor in tensors.items():
            found[number, name] = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def numbers(mesh_name, case):
    """The same steps on shards and on whole tensors of one device."""
    options = {"dtype": torch.float32, **CASES[case]}
    dtype = options.pop("dtype")
    mesh = init_device_mesh("cpu", MESHES[mesh_name][0], mesh_dim_names=MESHES[mesh_name][1])
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]

    def share(tensor):
        return distribute_tensor(tensor, mesh, placements)

    whole = [nn.Parameter(value) for value in values_of(0, dtype)]
    shards = [nn.Parameter(share(value)) for value in values_of(0, dtype)]
    optimizers = [FusedAdamW(params, **OPTIONS, **options) for params in (whole, shards)]
    with count_host_waits() as waits:
        norms = run_steps(optimizers[1], shards, dtype, share=share)
    return {
        "whole norms": run_steps(optimizers[0], whole, dtype),
        "norms": norms,
        "whole": state_of(optimizers[0], whole),
        "shards": state_of(optimizers[1], shards),
        "waits": [where for where in waits.origin if "adamw_shards" in where or "optimizer.py" in where],
        "bytes": [optimizers[1].state_bytes(param) for param in shards],
        "held bytes": [
            sum(
                tensor.to_local().nbytes if isinstance(tensor, DTensor) else 0
                for tensor in optimizers[1].state[param].values()
            )
            for param in shards
        ],
    }


def make_model(mesh_name, **options):
    """A small model in shards, and its optimizer."""
    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", MESHES[mesh_name][0], mesh_dim_names=MESHES[mesh_name][1])
    model = nn.Sequential(nn.Linear(256, 33), nn.Linear(33, 256)).bfloat16()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, FusedAdamW(model.parameters(), **OPTIONS, **options)


def train(model, optimizer, steps):
    for step in steps:
        x_TD = torch.randn(4, 256, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x_TD).float().square().mean().backward()
        optimizer.clip_next(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


def whole_state(model, optimizer):
    found = {name: value.detach() for name, value in model.named_parameters()}
    for parameter, state in get_optimizer_state_dict(model, optimizer)["state"].items():
        found |= {f"{parameter}.{name}": tensor for name, tensor in state.items()}
    # For copies, each rank holds the whole tensor.
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in found.items()
    }


def checkpoints(folder):
    """A run that stops and is resumed by the same shards, and by whole copies."""
    options = {"optim_bits": 8, "master_weights": True}
    model, optimizer = make_model("shards", **options)
    train(model, optimizer, range(3))
    path = folder / "saved.ckpt"
    save_folder(
        {"state_dict": model.state_dict(), "optimizer_states": [get_optimizer_state_dict(model, optimizer)]}, path
    )
    found = {"saved": whole_state(model, optimizer)}
    train(model, optimizer, range(3, 5))
    found["uninterrupted"] = whole_state(model, optimizer)
    for mesh_name in MESHES:
        model, optimizer = make_model(mesh_name, **options)
        load_folder(path, module=model, optimizers=[optimizer], strict=True)
        found["loaded", mesh_name] = whole_state(model, optimizer)
        train(model, optimizer, range(3, 5))
        found["resumed", mesh_name] = whole_state(model, optimizer)
    for name, other in (
        ("32 bits", {"master_weights": True}),
        ("no masters", {"optim_bits": 8}),
        ("torch", None),
    ):
        model, optimizer = make_model("shards", **(other or {}))
        if other is None:
            optimizer = torch.optim.AdamW(model.parameters())
        try:
            load_folder(path, module=model, optimizers=[optimizer], strict=True)
        except ResumeError as error:
            found["refused", name] = str(error)
    return found


def written_by_somebody_else():
    """Whether a master follows a parameter that was written since the last step, in each rank's shard."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4).bfloat16(), mesh, [Shard(0)]))
    optimizer = FusedAdamW([param], lr=0.0, master_weights=True)
    found = []
    for write in (lambda: None, lambda: param.mul_(3), lambda: param.to_local().mul_(3)):
        with torch.no_grad():
            write()
        param.grad = torch.zeros_like(param)
        optimizer.step()
        found.append(float(optimizer.master_of(param).to_local().mean()))
    return found


def refused():
    """The messages for what cannot be stepped."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = FusedAdamW([param])
    param.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    found = {}
    try:
        optimizer.step()
    except OptionError as error:
        found["gradient"] = str(error)
    plain = FusedAdamW([nn.Parameter(torch.ones(4, 4))])
    plain.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    plain.step()
    try:
        optimizer.load_state_dict(plain.state_dict())
    except ResumeError as error:
        found["whole state"] = str(error)
    return found


def main(folder):
    torch.distributed.init_process_group("gloo")
    folder = Path(folder)
    found = {(mesh_name, case): numbers(mesh_name, case) for mesh_name in MESHES for case in CASES}
    found["checkpoints"] = checkpoints(folder)
    found["refused"] = refused()
    found["written"] = written_by_somebody_else()
    torch.save(found, folder / f"found-{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
