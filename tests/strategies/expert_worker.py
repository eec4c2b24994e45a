"""Train tiny mixture-of-experts models whose experts are sharded, gathered or owned, on two ranks: ``-m
tests.strategies.expert_worker <part> <folder>``. Rank 0 writes what they found.
"""

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.bincount_router import BincountRouter
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import OptionError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.moe import expert_axis
from lightning_fastft.moe.expert_axis import AXIS_ATTRIBUTE, ExpertAxis
from lightning_fastft.moe.install import install_bincount_router
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.strategies.context_fit_worker import MAX_TOKENS, make_rows
from tests.strategies.strategy_worker import LORA, fit, make_tuner, trained_state
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import quiet_data, quiet_trainer

QWEN = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
EXPERT_LORA = {
    **LORA,
    "target_modules": ["q_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
# Name -> what is trained, the policy, and whether ranks own experts.
CASES = {
    "qwen, sharded": (QWEN, None, "keep", False),
    "qwen, owned": (QWEN, None, "recompute", True),
    "qwen, lora, sharded": (QWEN, EXPERT_LORA, "recompute", False),
    "qwen, lora, owned": (QWEN, EXPERT_LORA, "keep", True),
    "gpt-oss, sharded": (GPT_OSS, None, "recompute", False),
    "gpt-oss, owned": (GPT_OSS, None, "keep", True),
    "gpt-oss, lora, owned": (GPT_OSS, EXPERT_LORA, "recompute", True),
}
QUICK = "qwen, owned"
SAVED = ("qwen, owned", "qwen, lora, owned", "qwen, sharded")


class Watch(Callback):
    """Keep losses, and the gradients of the first step before they are clipped."""

    def __init__(self):
        self.losses, self.gradients = [], {}

    def on_before_backward(self, trainer, pl_module, loss):
        self.losses.append(loss.detach().clone())

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if not self.gradients:
            self.gradients = {
                name: whole(parameter.grad).clone()
                for name, parameter in pl_module.named_parameters()
                if parameter.grad is not None
            }


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def strategy_of(name, *, num_ranks, **options):
    _, _, policy, is_owned = CASES[name]
    activations = OffloadCheckpointing(policy)
    if num_ranks == 1:
        return FastFTStrategy(activations=activations)
    return FastFTFSDPStrategy(activations=activations, expert_parallel=num_ranks if is_owned else 1, **options)


def train(
    name, *, rank=0, num_ranks=1, folder=None, optimizer=None, strategy=None, callbacks=(), dtype="float32", **options
):
    """Losses of each window, gradients of the first step, and the trained weights of one case."""
    config, lora, *_ = CASES[name]
    seed_everything(5, verbose=False)
    module = make_tuner("full", config=config, optimizer=optimizer, lora=lora, tie_word_embeddings=False, dtype=dtype)
    watch = Watch()
    strategy = strategy or strategy_of(name, num_ranks=num_ranks)
    trainer = fit(
        module, strategy=strategy, rank=rank, folder=folder,
        callbacks=[BincountRouter(), *[FusedKernels()] * (lora is not None), watch, *callbacks], **options,
    )  # fmt: skip
    losses = torch.stack(watch.losses).view(-1, trainer.accumulate_grad_batches).sum(dim=1)
    if num_ranks > 1:
        torch.distributed.all_reduce(losses)
    return {
        "losses": losses / num_ranks,
        "gradients": watch.gradients,
        "state": trained_state(module),
        "statuses": " | ".join(status.reason for status in trainer.strategy.statuses()),
    }


# One layer of experts, without Lightning.

TOKENS = (7, 5)
FAMILIES = ("qwen3_moe", "gpt_oss")
# Dtype of the tokens, and whether experts are fp32 masters.
GPU_DTYPES = (("float32", False), ("bfloat16", False), ("bfloat16", True))
ROUTES = ("spread", "all to the first rank", "all to one expert of the last rank")


def skip_offset():
    """Every rank numbers experts from 0."""
    return mock.patch.object(ExpertAxis, "rank", property(lambda axis: 0, lambda axis, rank: None), create=True)


def count_twice():
    """Gradients of owned experts are not divided by the size of the axis."""
    return mock.patch.object(expert_axis, "_gradient_of_sum", expert_axis._gather)


def take_the_neighbours():
    """A rank gets the sums of the tokens of the next one."""
    real = expert_axis._sum
    return mock.patch.object(expert_axis, "_sum", lambda rows, axis: real(rows.roll(rows.shape[0] // 2, 0), axis))


FAULTS = (skip_offset, count_twice, take_the_neighbours)


def make_inputs(route, hidden_size):
    """Token states, experts and routing weights of every rank."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for num_tokens in TOKENS:
        x_TD = torch.randn(num_tokens, hidden_size, generator=generator)
        expert_TK = torch.rand(num_tokens, 4, generator=generator).topk(2).indices
        if route == ROUTES[1]:
            expert_TK = expert_TK % 2
        if route == ROUTES[2]:
            expert_TK = torch.full_like(expert_TK, 3)
        found.append((x_TD, expert_TK, torch.rand(num_tokens, 2, generator=generator)))
    return found


def run_layer(experts, inputs):
    """Outputs of some tokens, and gradients of a weighted sum of them."""
    x_TD, expert_TK, weight_TK = (tensor.clone() for tensor in inputs)
    x_TD.requires_grad_()
    weight_TK.requires_grad_()
    experts.zero_grad()
    y_TD = experts(x_TD, expert_TK, weight_TK)
    d_y_TD = torch.linspace(-1, 1, y_TD.numel(), dtype=y_TD.dtype, device=y_TD.device).view_as(y_TD)
    y_TD.backward(d_y_TD)
    return y_TD.detach(), x_TD.grad, weight_TK.grad


def compare_layer(family, route, *, rank, device="cpu", dtype=torch.float32, has_masters=False):
    """Largest difference between owned experts on two ranks and all experts on one, relative to the largest value."""
    models = [build_tiny(family).to(device, dtype) for _ in TOKENS]
    for model in models:
        install_bincount_router(model, ModelPatcher())
    alone, owned = (model.model.layers[0].mlp.experts for model in models)
    inputs = [(x_TD.to(device, dtype), *(each.to(device) for each in rest)) for x_TD, *rest in make_inputs(route, 32)]
    truth, sums = [], {}
    for each in inputs:
        truth.append(run_layer(alone, each))
        for name, parameter in alone.named_parameters():
            sums[name] = sums.get(name, 0) + parameter.grad.float()
    axis = ExpertAxis(None)
    axis.num_rows = max(TOKENS)
    setattr(owned, AXIS_ATTRIBUTE, axis)
    for name, parameter in list(owned.named_parameters()):
        share = parameter.detach().chunk(2)[rank].to(torch.float32 if has_masters else dtype, copy=True)
        setattr(owned, name, torch.nn.Parameter(share))
    if device != "cpu":
        # Compile kernels and open the communicator before.
        run_layer(owned, inputs[rank])
    with no_host_sync(device):
        found = run_layer(owned, inputs[rank])
    pairs = list(zip(found, truth[rank]))
    # Data parallelism divides the sum over all ranks by their number.
    pairs += [(parameter.grad, sums[name].chunk(2)[rank] / 2) for name, parameter in owned.named_parameters()]
    error = torch.stack(
        [(own.float() - other).abs().max() / other.float().abs().max().clamp(min=1e-3) for own, other in pairs]
    ).max()
    torch.distributed.all_reduce(error, op=torch.distributed.ReduceOp.MAX)
    return float(error)


@contextlib.contextmanager
def no_host_sync(device):
    """Fail on a host sync."""
    if device != "cpu":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device != "cpu":
            torch.cuda.set_sync_debug_mode("default")


def run_gpu(rank, folder):
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    return {
        (family, route, dtype, has_masters): compare_layer(
            family, route, rank=rank, device=f"cuda:{rank}", dtype=getattr(torch, dtype), has_masters=has_masters
        )
        for family in FAMILIES
        for route in ROUTES
        for dtype, has_masters in GPU_DTYPES
    }


def run_layers(rank):
    found = {(family, route): compare_layer(family, route, rank=rank) for family in FAMILIES for route in ROUTES}
    for fault in FAULTS:
        with fault():
            found[fault.__name__] = compare_layer("qwen3_moe", ROUTES[0], rank=rank)
    return found


def run_quick(rank, folder):
    torch.distributed.init_process_group("gloo")
    return {"layers": run_layers(rank), QUICK: train(QUICK, rank=rank, num_ranks=2, folder=folder)}


def run_all(rank, folder):
    found = {name: train(name, rank=rank, num_ranks=2, folder=folder) for name in CASES if name != QUICK}
    for name in SAVED:
        for is_folder in (True, False):
            for form in ("whole", "resumed"):
                found[name, is_folder, form] = save_or_resume(name, form, rank, folder, is_folder=is_folder)
    found["bf16"] = {name: train_in_bf16(name, rank, folder) for name in ("qwen, owned", "qwen, sharded")}
    found["bf16 lora"] = train("qwen, lora, sharded", rank=rank, num_ranks=2, folder=folder, dtype="bfloat16")
    found["parts"] = [train_on_parts(folder, expert_parallel=size) for size in (1, 2)]
    found["placed"] = {is_folder: place_anew(rank, folder, is_folder=is_folder) for is_folder in (True, False)}
    found["refused"] = {name: refusal(run) for name, run in refused_runs(rank, folder).items()}
    return found


def run_copies(rank, folder):
    """Four ranks: two copies, each over two ranks, which have the data of one of two ranks."""
    strategy = strategy_of(QUICK, num_ranks=2, shard=2)
    return {QUICK: train(QUICK, rank=rank // 2, num_ranks=4, folder=folder, strategy=strategy, num_copies=2)}


def place_of(name, folder, *, is_folder):
    return folder / f"{name.replace(', ', '-')}-{is_folder}"


def save_or_resume(name, form, rank, folder, *, is_folder):
    """Four steps of AdamW, or the last two of them from the checkpoint of the second; the trained weights."""
    place = place_of(name, folder, is_folder=is_folder)
    path = place / "step=2.ckpt"
    saving = ModelCheckpoint(dirpath=place, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"enable_checkpointing": True} if form == "whole" else {"ckpt_path": path}
    strategy = strategy_of(name, num_ranks=2, save_distributed_checkpoint=is_folder)
    return train(
        name, rank=rank, num_ranks=2, folder=folder, max_steps=4, strategy=strategy, optimizer=adamw,
        callbacks=[saving] if form == "whole" else [], **options,
    )["state"]  # fmt: skip


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def resume(name, path, *, rank=0, num_ranks=1, folder=None):
    """The last two of four steps on other ranks, or with experts gathered instead of owned."""
    return train(
        name, rank=rank, num_ranks=num_ranks, folder=folder, max_steps=4, optimizer=adamw, ckpt_path=path
    )["state"]  # fmt: skip


def place_anew(rank, folder, *, is_folder):
    """Four steps with adapters that every rank holds whole, and the last two of them with adapters placed by "auto"."""
    name, place = "qwen, lora, owned", folder / f"placed-{is_folder}"
    saving = ModelCheckpoint(place, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    options = {
        "replicate": {"callbacks": [saving], "enable_checkpointing": True},
        "auto": {"ckpt_path": place / "step=2.ckpt"},
    }
    found = {}
    for adapters, others in options.items():
        strategy = strategy_of(name, num_ranks=2, adapters=adapters, save_distributed_checkpoint=is_folder)
        found[adapters] = train(
            name, rank=rank, num_ranks=2, folder=folder, max_steps=4, strategy=strategy, optimizer=adamw, **others
        )
    return found


def run_exchange(rank, folder, path):
    """Resume from a folder of owned experts with gathered ones."""
    return resume("qwen, sharded", path, rank=rank, num_ranks=2, folder=folder)


class Dtypes(Callback):
    """Dtypes of experts: of their weights, their gradients and their computation."""

    def __init__(self):
        self.found = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        stack = pl_module.model.model.layers[0].mlp.experts.down_proj
        self.found = {"held": str(stack.dtype), "gradient": str(stack.grad.dtype)}


def train_in_bf16(name, rank, folder):
    dtypes = Dtypes()
    found = train(name, rank=rank, num_ranks=2, folder=folder, callbacks=[dtypes], dtype="bfloat16")
    return {**dtypes.found, "gradients": found["gradients"]}


def train_on_parts(folder, *, expert_parallel):
    """Trained weights and the validation loss of ranks that share each pack, and gather or own experts."""
    seed_everything(5, verbose=False)
    module = make_tuner("full", config=QWEN, tie_word_embeddings=False)
    strategy = FastFTFSDPStrategy(context_parallel=2, expert_parallel=expert_parallel)
    trainer = quiet_trainer(
        folder,
        devices=2,
        strategy=strategy,
        max_steps=2,
        num_sanity_val_steps=0,
        val_check_interval=2,
        callbacks=[BincountRouter()],
    )
    data = quiet_data(make_rows(16, seed=1), val_paths=make_rows(4, seed=2), max_tokens=MAX_TOKENS)
    trainer.fit(module, data)
    return {"state": trained_state(module), "val_loss": trainer.callback_metrics["val_loss"]}


def refused_runs(rank, folder):
    """Runs that are refused, by name."""

    def fit_dense():
        fit(make_tuner("full"), strategy=owners(), rank=rank, folder=folder, callbacks=[BincountRouter()])

    def fit_without_router():
        module = make_tuner("full", config=QWEN, tie_word_embeddings=False)
        fit(module, strategy=owners(), rank=rank, folder=folder)

    def fit_nf4():
        module = make_tuner("nf4 experts")
        fit(module, strategy=FastFTFSDPStrategy(), rank=rank, folder=folder, callbacks=[BincountRouter()])

    def fit_three_experts():
        module = make_tuner("full", config={**QWEN, "num_experts": 3}, tie_word_embeddings=False)
        fit(module, strategy=owners(), rank=rank, folder=folder, callbacks=[BincountRouter()])

    return {
        "dense": fit_dense, "no router": fit_without_router, "nf4": fit_nf4, "three experts": fit_three_experts,
    }  # fmt: skip


def owners():
    return FastFTFSDPStrategy(expert_parallel=2)


def refusal(run):
    try:
        run()
    except (OptionError, UnsupportedModelError) as error:
        return str(error)
    return ""


PARTS = {"gpu": run_gpu, "quick": run_quick, "all": run_all, "copies": run_copies, "exchange": run_exchange}


def main(part, folder, *arguments):
    rank, folder = int(os.environ["RANK"]), Path(folder)
    found = PARTS[part](rank, folder, *arguments)
    if rank == 0:
        torch.save(found, folder / f"{part}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
