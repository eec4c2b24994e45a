"""Train tiny models under the strategies of several devices; run by torchrun on two ranks: ``-m
tests.strategies.strategy_worker <part> <folder>``.

Each part is a list of cases that run one after the other in the same two processes; rank 0 writes what they found to
``<folder>/<part>.pt``.
"""

import os
import sys
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.data import DataLoader

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.activations.frozen_weights import GatheredWeights
from lightning_fastft.checkpoint.resume import ExactResume
from lightning_fastft.core.errors import OptionError
from lightning_fastft.fused import low_precision_adapters as adapters
from lightning_fastft.hf.sharding.state import gather_state, is_sharded
from lightning_fastft.strategies.ddp import FastFTDDPStrategy
from lightning_fastft.strategies.fsdp2 import FastFTFSDPStrategy
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.rank_exit import leave
from tests.support.token_weighting_worker import CONFIG, micro_batches
from tests.support.training_parts import PlainModule, quiet_trainer, tiny_llama
from tests.support.two_ranks import run_two_ranks

NUM_RANKS, NUM_WINDOWS, ACCUMULATE = 2, 2, 2
LORA = {"r": 4, "lora_alpha": 4, "init_lora_weights": False}
# Sums of fp32 gradients in another order, two steps of plain SGD: the order alone gives 1e-8.
BOUND = 1e-6
# Small enough that every step is clipped.
CLIP_NORM = 0.5
KINDS = {
    "full": {},
    "full, head of its own": {"tie_word_embeddings": False},
    "lora": {"lora": LORA},
    "dora": {"lora": {**LORA, "use_dora": True}},
    "lora, trained copies": {"lora": {**LORA, "modules_to_save": ["lm_head"]}, "tie_word_embeddings": False},
    "nf4": {"lora": LORA, "quantization": "nf4"},
    "nf4 experts": {
        "lora": {
            **LORA,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        "quantization": "nf4",
        "config": {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "decoder_sparse_step": 1,
        },
    },
}
STRATEGIES = {"ddp": FastFTDDPStrategy, "fsdp": FastFTFSDPStrategy, "one": FastFTStrategy}
# Each kind and each policy once; that policies change no bit is tested on one process.
EQUALITY = [("full", "keep"), ("lora", "recompute"), ("nf4", "recompute")]
DDP_EQUALITY = [*EQUALITY, ("nf4 experts", "recompute")]
# Options of a run, of LoRA whose layers recompute unless a kind or a policy is named.
FSDP_CHOICES = {
    "sharded adapters": {"adapters": "shard"},
    "resident": {"weights": "resident"},
    "resident, sharded adapters": {"weights": "resident", "adapters": "shard"},
    "resident, activations kept": {"weights": "resident", "policy": "keep"},
    "resident, every weight": {"weights": "resident", "policy": "keep", "kind": "full"},
}
FSDP_EQUALITY = [
    *EQUALITY,
    ("dora", "recompute"),
    ("full, head of its own", "keep"),
    ("lora, trained copies", "recompute"),
]
# Kinds that save before their first step, and whether as a folder.
EARLY_SAVES = {"lora": True, "full": False}


def difference(found, truth):
    """Relative distance of two states, over all tensors."""
    assert found.keys() == truth.keys()
    distance = sum(float((found[name].double() - truth[name].double()).square().sum()) for name in truth) ** 0.5
    return distance / sum(float(value.double().square().sum()) for value in truth.values()) ** 0.5


def run_on_two_ranks(part, folder):
    """What the worker found."""
    run_two_ranks("tests.strategies.strategy_worker", part, folder)
    return torch.load(folder / f"{part}.pt", weights_only=True)


class Watch(Callback):
    """Counts what is sent in the backwards, and keeps what the parts are at the end."""

    def __init__(self):
        self.num_reductions, self.num_gathers = [], []
        self.head = None

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._counter = CollectiveCounter().__enter__()
        self.head = (
            type(pl_module.model.get_output_embeddings()).__name__
            if hasattr(pl_module.model, "get_output_embeddings")
            else None
        )

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self._counter.__exit__(None, None, None)
        self.num_reductions.append(self._counter.num_reductions)
        self.num_gathers.append(self._counter.num_gathers)
        self.status = " | ".join(status.reason for status in trainer.strategy.statuses())


class LookBeforeStep(Callback):
    """Runs the model without a backward between the backward and the step."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._batch = batch

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        with torch.no_grad():
            pl_module.model(**self._batch)


class CollectiveCounter:
    """Counts gradient reductions, the reduce-scatters of FSDP2 and all-reduces of whole gradients, gathers of units, and
    the bytes that a rank receives in these, its own included.
    """

    # By the names of all versions of torch. A dispatch mode, which sees every operator, takes longer than the step.
    REDUCTIONS = ("reduce_scatter_tensor", "reduce_scatter_single", "all_reduce")
    GATHERS = ("all_gather_into_tensor", "all_gather_single")

    def __init__(self):
        self.num_reductions = self.num_gathers = self.num_gathered_bytes = 0
        self._patches = ExitStack()

    def __enter__(self):
        for names, count in ((self.REDUCTIONS, self._count_reduction), (self.GATHERS, self._count_gather)):
            for name in names:
                if real := getattr(torch.distributed, name, None):
                    self._patches.enter_context(mock.patch.object(torch.distributed, name, partial(count, real)))
        return self

    def __exit__(self, *error):
        self._patches.close()

    def _count_reduction(self, real, *args, **options):
        self.num_reductions += 1
        return real(*args, **options)

    def _count_gather(self, real, output_tensor, *args, **options):
        self.num_gathers += 1
        self.num_gathered_bytes += output_tensor.nbytes
        return real(output_tensor, *args, **options)


class CountBuckets(Callback):
    """Counts the buckets that DDP's reducer sends, per micro-batch."""

    def __init__(self):
        self.by_batch = Counter()
        self._batch_idx = 0

    def on_train_start(self, trainer, pl_module):
        trainer.strategy.model.register_comm_hook(None, self._send)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._batch_idx = batch_idx

    def _send(self, state, bucket):
        self.by_batch[self._batch_idx] += 1
        buffer = bucket.buffer().div_(NUM_RANKS)
        return torch.distributed.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def make_tuner(kind, *, dtype="float32", optimizer=None, **options):
    settings = {**KINDS[kind], **options}
    config = {**CONFIG, **settings.pop("config", {})}
    tie = {"tie_word_embeddings": settings.pop("tie_word_embeddings", CONFIG["tie_word_embeddings"])}
    # Plain SGD: a step is linear in the gradient, so that a bound on sums is a bound on weights.
    optimizer = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.5))
    return FineTuner(
        {**config, **tie},
        init="random",
        dtype=dtype,
        optimizer=optimizer,
        scheduler="constant",
        warmup_share=0.0,
        **settings,
    )


def batches_of(rank, *, world_size, num_windows=NUM_WINDOWS, **options):
    """The micro-batches of one rank; one process with all of them has the same windows."""
    windows = [
        micro_batches(accumulate=ACCUMULATE, world_size=NUM_RANKS, rank=number, **options)
        for number in range(NUM_RANKS)
    ]
    if world_size == NUM_RANKS:
        return windows[rank] * num_windows
    return [batch for pair in zip(*windows) for batch in pair] * num_windows


def fit(module, *, strategy, rank=0, folder=None, max_steps=NUM_WINDOWS, ckpt_path=None, num_copies=1, **options):
    """Train for some windows; the number of devices is the strategy's, times that of copies."""
    world_size = 1 if isinstance(strategy, FastFTStrategy) else NUM_RANKS
    settings = {
        "accelerator": "cpu",
        "gradient_clip_val": CLIP_NORM,
        "enable_checkpointing": False,
        "accumulate_grad_batches": ACCUMULATE * NUM_RANKS // world_size,
        **options,
    }
    trainer = quiet_trainer(
        folder,
        devices=world_size * num_copies,
        strategy=strategy,
        max_steps=max_steps,
        use_distributed_sampler=False,
        **settings,
    )
    batches = batches_of(rank, world_size=world_size, num_windows=max_steps)
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def trained_state(module):
    """The trained weights of a finished run, whole, by name."""
    model = module.model
    if is_sharded(model):
        return gather_state(model, is_trained_only=True)
    return {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


def train(kind, policy, strategy_name, *, rank=0, folder=None, weights="auto", more_callbacks=(), **options):
    """The trained weights of one case, and its callbacks."""
    seed_everything(5, verbose=False)
    module = make_tuner(kind)
    strategy = STRATEGIES[strategy_name](activations=OffloadCheckpointing(policy, weights=weights), **options)
    watch = {"ddp": CountBuckets, "fsdp": Watch}.get(strategy_name, Callback)()
    fit(module, strategy=strategy, rank=rank, folder=folder, callbacks=[watch, *more_callbacks])
    return trained_state(module), watch


def run_ddp(rank, folder):
    found = {}
    for kind, policy in DDP_EQUALITY:
        state, buckets = train(kind, policy, "ddp", rank=rank, folder=folder)
        found[kind, policy] = state
        found[kind, policy, "batches with a reduction"] = sorted(buckets.by_batch)
    found["options"] = options_of_ddp(rank, folder)
    found["after a failure"] = loop_after_a_failure(rank, folder)
    found["signals on one rank"] = loop_where_one_rank_leaves_signals_alone(rank, folder)
    found["monitored"] = monitored(folder, rank=rank, strategy=FastFTDDPStrategy())
    found["asked"] = {is_exact: how_often_lightning_asks(rank, folder, is_exact=is_exact) for is_exact in (True, False)}
    for form in ("uninterrupted", "resumed"):
        found["checkpoint", form] = checkpointed("lora", form, rank, folder, strategy=FastFTDDPStrategy())
    return found


def options_of_ddp(rank, folder):
    """The options of DistributedDataParallel arrive, and train to the same weights."""
    found = {}
    for options in ({"static_graph": True}, {"find_unused_parameters": True}):
        seed_everything(5, verbose=False)
        module = make_tuner("lora")
        strategy = FastFTDDPStrategy(activations=OffloadCheckpointing("recompute"), **options)
        trainer = fit(module, strategy=strategy, rank=rank, folder=folder)
        found |= {name: (trainer.strategy._ddp_kwargs.get(name), trained_state(module)) for name in options}
    return found


def how_often_lightning_asks(rank, folder, *, is_exact):
    """Questions of rank 0 whether it was told to stop, each a wait for the device; and whether the loop is left
    as it was.
    """
    real, asked = _TrainingEpochLoop._broadcast_sigterm_tensor, []

    def counted(loop):
        asked.append(True)
        real(loop)

    with mock.patch.object(_TrainingEpochLoop, "_broadcast_sigterm_tensor", counted):
        trainer = fit(make_tuner("lora"), strategy=FastFTDDPStrategy(exact_resume=is_exact), rank=rank, folder=folder)
    return len(asked), _is_loop_changed(trainer)


def _is_loop_changed(trainer):
    return "_broadcast_sigterm_tensor" in vars(trainer.fit_loop.epoch_loop)


class Fail(Callback):
    """Fails on every rank after a micro-batch, and keeps whether Lightning's loop was changed then."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.trainer, self.was_changed = trainer, _is_loop_changed(trainer)
        raise ValueError("planted")


def loop_after_a_failure(rank, folder):
    """Whether the loop was changed while the run lasted, and after it."""
    fail = Fail()
    try:
        fit(make_tuner("lora"), strategy=FastFTDDPStrategy(), rank=rank, folder=folder, callbacks=[fail])
    except ValueError:
        return fail.was_changed, _is_loop_changed(fail.trainer)
    raise AssertionError("nothing failed")


def loop_where_one_rank_leaves_signals_alone(rank, folder):
    """Whether the loop was changed where the signals come here on one rank only."""
    fail = Fail()
    try:
        fit(
            make_tuner("lora"),
            strategy=FastFTDDPStrategy(),
            rank=rank,
            folder=folder,
            callbacks=[fail, ExactResume(stop_signals=rank == 0)],
        )
    except ValueError:
        return fail.was_changed
    raise AssertionError("nothing failed")


def run_fsdp(rank, folder):
    found = {}
    for kind, policy in FSDP_EQUALITY:
        state, watch = train(kind, policy, "fsdp", rank=rank, folder=folder)
        found[kind, policy] = state
        found[kind, policy, "head"] = watch.head
        found[kind, policy, "reductions"] = watch.num_reductions
        found[kind, policy, "gathers"] = watch.num_gathers
        found[kind, policy, "status"] = watch.status
    for name, options in FSDP_CHOICES.items():
        options = {"kind": "lora", "policy": "recompute", **options}
        state, watch = train(strategy_name="fsdp", rank=rank, folder=folder, **options)
        found[name] = {
            "state": state,
            "reductions": watch.num_reductions,
            "gathers": watch.num_gathers,
            "status": watch.status,
        }
    for weights in ("auto", "resident"):
        options = {"rank": rank, "folder": folder, "weights": weights, "more_callbacks": [LookBeforeStep()]}
        found["looks before steps", weights], _ = train("full", "keep", "fsdp", **options)
    found["planned"] = planned(rank, folder)
    found["every batch"] = reductions_of_every_batch(rank, folder)
    found["by name"] = by_name(rank, folder)
    for kind in ("lora", "full"):
        for is_folder in (True, False):
            for form in ("uninterrupted", "resumed"):
                strategy = FastFTFSDPStrategy(save_distributed_checkpoint=is_folder)
                found["checkpoint", kind, is_folder, form] = checkpointed(kind, form, rank, folder, strategy=strategy)
    for kind, is_folder in EARLY_SAVES.items():
        found["early save", kind] = saved_before_the_first_step(kind, rank, folder, is_folder=is_folder)
    found["bf16"] = masters(rank, folder)
    found["bf16 adapters"] = narrow_adapters(strategy=FastFTFSDPStrategy(), rank=rank, folder=folder)
    found["foreign"] = foreign(rank, folder)
    found["validation"] = validation(rank, folder)
    found["monitored"] = monitored(folder, rank=rank, strategy=FastFTFSDPStrategy())
    found["refused"] = refused(rank, folder)
    return found


def planned(rank, folder):
    """Gathers of each micro-batch where ranks have room for different numbers of units, which all use the minimum."""
    seed_everything(5, verbose=False)
    module, watch = make_tuner("lora"), Watch()
    activations = OffloadCheckpointing("auto", vram_budget=64.0)
    seen = []
    real = GatheredWeights.num_within

    def num_within(gathered, num_bytes):
        seen.append(real(gathered, num_bytes))
        return 2 + rank

    with mock.patch.object(GatheredWeights, "num_within", num_within):
        strategy = FastFTFSDPStrategy(activations=activations)
        fit(module, strategy=strategy, rank=rank, folder=folder, callbacks=[watch], max_steps=4)
    return {"gathers": watch.num_gathers, "fits": seen, "text": activations.status().reason}


def reductions_of_every_batch(rank, folder):
    watch = Watch()
    seed_everything(5, verbose=False)
    module = make_tuner("full")
    fit(module, strategy=FastFTFSDPStrategy(gradient_sync="batch"), rank=rank, folder=folder, callbacks=[watch])
    return {"reductions": watch.num_reductions, "state": trained_state(module)}


def by_name(rank, folder):
    """What Trainer(strategy="fastft_fsdp") makes of two processes, with the default optimizer."""
    module = make_tuner("lora", optimizer=None)
    module.optimizer_factory = None
    trainer = fit(module, strategy="fastft_fsdp", rank=rank, folder=folder)
    mesh = trainer.strategy.device_mesh
    return {
        "sizes": [mesh["data_parallel"].size(), mesh["tensor_parallel"].size()],
        "strategy": type(trainer.strategy).__name__,
        "optimizer": type(trainer.optimizers[0]).__name__,
        "statuses": [tuple(status)[:2] for status in trainer.strategy.statuses()],
        "reasons": " | ".join(status.reason for status in trainer.strategy.statuses()),
        "num_units": sum(isinstance(part, FSDPModule) for part in module.modules()),
    }


def checkpointed(kind, form, rank, folder, *, strategy):
    """Four steps at once, or two from the checkpoint that those four left behind; AdamW, so that its state counts, in
    one pass or that of torch.
    """
    strategy_name = type(strategy).__name__
    place = Path(folder) / f"{strategy_name}-{kind}-{getattr(strategy, '_save_distributed_checkpoint', '')}"
    seed_everything(5, verbose=False)
    adamw = FusedAdamW if kind == "full" else torch.optim.AdamW
    module = make_tuner(kind, optimizer=lambda parameters: adamw(parameters, lr=0.01))
    saved = ModelCheckpoint(dirpath=place, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    path = place / "step=2.ckpt"
    options = {"callbacks": [saved], "enable_checkpointing": True} if form == "uninterrupted" else {"ckpt_path": path}
    trainer = fit(module, strategy=strategy, rank=rank, folder=folder, max_steps=4, **options)
    assert trainer.global_step == 4
    found = {"state": trained_state(module), "is_folder": path.is_dir()}
    if path.is_file():
        found["keys"] = sorted(torch.load(path, weights_only=True, map_location="cpu")["state_dict"])
    module.save_pretrained(str(place / "export"))
    torch.distributed.barrier()
    return found


class SaveEarly(Callback):
    """Saves before the first micro-batch, and inside the first accumulation window."""

    def __init__(self, paths):
        self.paths = paths

    def on_train_start(self, trainer, pl_module):
        trainer.save_checkpoint(self.paths["at start"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            trainer.save_checkpoint(self.paths["in window"])


def saved_before_the_first_step(kind, rank, folder, *, is_folder):
    """States of a run that saves nothing, of one that saves before its first optimizer step, and of those resumed from
    there.
    """
    adamw = FusedAdamW if kind == "full" else torch.optim.AdamW

    def run(**options):
        seed_everything(5, verbose=False)
        module = make_tuner(kind, optimizer=lambda parameters: adamw(parameters, lr=0.01))
        strategy = FastFTFSDPStrategy(save_distributed_checkpoint=is_folder)
        fit(module, strategy=strategy, rank=rank, folder=folder, **options)
        return trained_state(module)

    paths = {where: str(Path(folder) / f"early-{kind}-{where}.ckpt") for where in ("at start", "in window")}
    found = {"plain": run(), "saved": run(callbacks=[SaveEarly(paths)])}
    return found | {f"resumed {where}": run(ckpt_path=path) for where, path in paths.items()}


def narrow_adapters(*, strategy, rank=0, folder=None):
    """The loss of each micro-batch of rank 0 in bf16 with fp32 adapters, and how often an adapter computed beside
    its base.
    """
    losses, num_calls = [], 0
    real = adapters.lora_addmm

    def counted(*args, **options):
        nonlocal num_calls
        num_calls += 1
        return real(*args, **options)

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(outputs["loss"].detach().clone())

    seed_everything(5, verbose=False)
    module = make_tuner("lora", dtype="bfloat16")
    with mock.patch.object(adapters, "lora_addmm", counted):
        fit(module, strategy=strategy, rank=rank, folder=folder, callbacks=[Look()])
    return {"losses": torch.stack(losses), "calls": num_calls, "state": trained_state(module)}


def masters(rank, folder):
    """Dtypes of full fine-tuning in bf16, and what the state of the optimizer is."""
    found = {}
    for name in ("auto", "bfloat16"):
        module = make_tuner(
            "full",
            dtype="bfloat16",
            master_dtype=name,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        )
        seen = {}
        layer_dtypes = seen.setdefault("layer", set())

        class Look(Callback):
            def on_train_start(self, trainer, pl_module, seen=layer_dtypes):
                norm = pl_module.model.model.layers[0].input_layernorm
                norm.register_forward_hook(
                    lambda part, inputs, output: seen.add((str(part.weight.dtype), str(output.dtype)))
                )

            def on_before_optimizer_step(self, trainer, pl_module, optimizer, seen=seen):
                seen["gradient"] = {str(parameter.grad.dtype) for parameter in pl_module.parameters()}

        trainer = fit(module, strategy=FastFTFSDPStrategy(), rank=rank, folder=folder, callbacks=[Look()])
        seen["parameter"] = {str(parameter.dtype) for parameter in module.parameters()}
        seen["average"] = {str(state["exp_avg"].dtype) for state in trainer.optimizers[0].state.values()}
        export = Path(folder) / f"export-{name}"
        module.save_pretrained(str(export))
        torch.distributed.barrier()
        found[name] = {key: sorted(value) for key, value in seen.items()}
    return found


class Lazy(PlainModule):
    """A user's own module that builds its model where Lightning wants it, and shards nothing."""

    def __init__(self, *, has_extra_head=False):
        super().__init__(None)
        self.extra = torch.nn.Linear(3, 3) if has_extra_head else None

    def configure_model(self):
        if self.model is None:
            torch.manual_seed(11)
            self.model = tiny_llama()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


class ShardsItself(Lazy):
    """The same with the sharding in it."""

    def configure_model(self):
        super().configure_model()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class Interleaved(ShardsItself):
    """A fused projection as the tensor parallelism of transformers splits it: rows of both halves on each rank."""

    def configure_model(self):
        super().configure_model()
        mesh = self.device_mesh["tensor_parallel"]
        rows = DTensor.from_local(torch.zeros(2, 3), mesh, [_StridedShard(0, split_factor=2)])
        self.register_parameter("gate_up", torch.nn.Parameter(rows))


class Monitored(Lazy):
    """Logs a number of its rank at each step, which its learning rate follows."""

    NUMBERS = ((4.0, 3.0), (0.0, 2.0))

    def training_step(self, batch, batch_idx):
        self.log("own", self.NUMBERS[self.global_rank][self.global_step])
        if self.global_rank == 0:
            self.log("first", 7.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "own", "interval": "step"}}


# The mean of the two ranks rises, which halves the learning rate.
MONITORED = {
    "file": "step=1-own=2.0-first=7.ckpt",
    "is_there": True,
    "scores": [2.0, 2.5],
    "learning_rate": 0.25,
    "is_changed": False,
}


def monitored(folder, *, rank, strategy):
    """What each rank does with a metric that differs between the ranks."""
    saver = ModelCheckpoint(
        Path(folder) / f"monitored-{type(strategy).__name__}",
        filename="{step}-{own:.1f}-{first:.0f}",
        monitor="own",
        every_n_train_steps=1,
    )
    stopper = EarlyStopping("own", check_on_train_epoch_end=True)
    options = {"callbacks": [saver, stopper], "enable_checkpointing": True}
    trainer = fit(Monitored(), strategy=strategy, rank=rank, folder=folder, **options)
    found = [None] * NUM_RANKS
    own = {
        "file": Path(saver.best_model_path).name,
        "is_there": Path(saver.best_model_path).exists(),
        "scores": [float(saver.best_model_score), float(stopper.best_score)],
        "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        "is_changed": any(
            "_monitor" in name or "_evaluate" in name for each in (saver, stopper) for name in vars(each)
        ),
    }
    torch.distributed.all_gather_object(found, own)
    return found


def foreign(rank, folder):
    found = {}
    for kind in (Lazy, ShardsItself):
        module = kind()
        trainer = fit(module, strategy=FastFTFSDPStrategy(), rank=rank, folder=folder)
        found[kind.__name__] = {
            "state": trained_state(module),
            "sharding": [status.name for status in trainer.strategy.statuses()],
        }
    return found


def validation(rank, folder):
    """Validate before, between and after training: the root holds its weights whole after each of them."""
    seed_everything(5, verbose=False)
    module = make_tuner("full")
    batches = batches_of(rank, world_size=NUM_RANKS)
    trainer = quiet_trainer(
        folder,
        devices=2,
        strategy=FastFTFSDPStrategy(save_distributed_checkpoint=False),
        max_steps=2,
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
        accumulate_grad_batches=ACCUMULATE,
        val_check_interval=2,
        gradient_clip_val=CLIP_NORM,
    )
    before = trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)[0]["val_loss"]
    trainer.fit(module, DataLoader(batches, batch_size=None), DataLoader(batches, batch_size=None))
    keys = sorted(trainer.strategy.lightning_module_state_dict())
    after = trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)[0]["val_loss"]
    return {"before": before, "after": after, "state": trained_state(module), "num_keys": len(keys)}


def refused(rank, folder):
    """The messages of what cannot be served."""
    cases = {
        "sizes": lambda: fit(
            make_tuner("lora"), strategy=FastFTFSDPStrategy(data_parallel_size=3), rank=rank, folder=folder
        ),
        "averaging": lambda: fit(
            make_tuner("lora"),
            strategy=FastFTFSDPStrategy(),
            rank=rank,
            folder=folder,
            callbacks=[EMAWeightAveraging()],
        ),
        "tensor parallel FineTuner": lambda: fit(
            make_tuner("lora"), strategy=FastFTFSDPStrategy(tensor_parallel_size=2), rank=rank, folder=folder
        ),
        "tensor parallel foreign": lambda: fit(
            Lazy(), strategy=FastFTFSDPStrategy(tensor_parallel_size=2), rank=rank, folder=folder
        ),
        "interleaved": lambda: fit(
            Interleaved(), strategy=FastFTFSDPStrategy(tensor_parallel_size=2), rank=rank, folder=folder
        ),
        "precision by name": lambda: fit(
            make_tuner("lora"), strategy="fastft_fsdp", rank=rank, folder=folder, precision="64-true"
        ),
        "eager": lambda: fit(PlainModule(tiny_llama()), strategy=FastFTFSDPStrategy(), rank=rank, folder=folder),
        "outside": lambda: fit(Lazy(has_extra_head=True), strategy=FastFTFSDPStrategy(), rank=rank, folder=folder),
        "adafactor": lambda: fit(
            make_tuner("full", optimizer=torch.optim.Adafactor), strategy=FastFTFSDPStrategy(), rank=rank, folder=folder
        ),
        "rprop": lambda: fit(
            make_tuner("full", optimizer=torch.optim.Rprop), strategy=FastFTFSDPStrategy(), rank=rank, folder=folder
        ),
    }
    found = {}
    for name, run in cases.items():
        try:
            run()
        except OptionError as error:
            found[name] = str(error)
    return found


def main(part, folder):
    register_strategies()
    rank = int(os.environ["RANK"])
    found = {"ddp": run_ddp, "fsdp": run_fsdp}[part](rank, folder)
    if rank == 0:
        torch.save(found, Path(folder) / f"{part}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave()
