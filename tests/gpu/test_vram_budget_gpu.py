"""A budget of device memory on a GPU: the whole run stays within it, with the losses of a run without one.

The runs share a process of their own: what earlier tests left on the device would count against the budget.
"""

import gc
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.memory_error import DeviceMemoryError
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.packs import make_documents
from tests.support.sizes import sizes
from tests.support.training_parts import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")]

CONFIG = sizes(
    model_type="llama", vocab=4096, width=1024, inner=4096, layers=16, heads=8, key_heads=8, tie_word_embeddings=False
)
# Two layers whose feed-forward blocks take most of the memory of a step.
WIDE = sizes(
    model_type="llama", vocab=4096, width=256, inner=16384, layers=2, heads=4, key_heads=4, tie_word_embeddings=False
)
NUM_STEPS = 9


class Peaks(Callback):
    """Record losses, the peak reserved memory with that of loading, and the memory of the leanest plan."""

    def __init__(self):
        self.losses, self.reserved, self.statuses, self.least_bytes, self.num_tiles = [], 0, [], None, 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        self.statuses = trainer.strategy.statuses()
        stack = trainer.strategy.checkpointing.stacks[-1]
        self.least_bytes, self.num_tiles = self.least_bytes or stack.least_bytes, stack.num_tiles
        assert all(torch.any(item.grad != 0) for item in pl_module.parameters() if item.requires_grad)


class RunsOutOnce(Callback):
    """Asks for memory that no device has, in the backward of a late step, between two layers."""

    def on_train_start(self, trainer, pl_module):
        self.num_failed = 0

        def fail(grad):
            if trainer.global_step == NUM_STEPS - 2 and not self.num_failed:
                self.num_failed += 1
                torch.empty(2**50, dtype=torch.uint8, device=grad.device)

        layers = pl_module.model.get_base_model().model.layers
        layers[8].register_forward_pre_hook(lambda layer, args: args[0].register_hook(fail) and None)


@pytest.fixture(scope="module")
def fit():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda *arguments, **options: pool.submit(fit_here, *arguments, **options).result()


def fit_here(folder, *, config=CONFIG, num_steps=NUM_STEPS, runs_out=False, **activations):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    lora = {"r": 8, "init_lora_weights": False}
    tuner = FineTuner(config, init="random", dtype="bfloat16", lora=lora, scheduler="constant", learning_rate=1e-4)
    peaks = Peaks()
    batch = collate(make_documents((2000, 1500, 500, 96)))
    loader = torch.utils.data.DataLoader([batch] * NUM_STEPS, batch_size=None, collate_fn=lambda batch: batch)
    strategy = FastFTStrategy(activations=OffloadCheckpointing("auto", host_budget=2, **activations))
    callbacks = [peaks, RunsOutOnce()] if runs_out else [peaks]
    trainer = quiet_trainer(folder, accelerator="gpu", strategy=strategy, max_steps=num_steps, callbacks=callbacks)
    try:
        trainer.fit(tuner, loader)
    finally:
        assert torch.cuda.get_per_process_memory_fraction() == 1.0
    if runs_out:
        assert callbacks[-1].num_failed == 1
    names = ("losses", "reserved", "statuses", "least_bytes", "num_tiles")
    return SimpleNamespace(**{name: getattr(peaks, name) for name in names})


@pytest.fixture(scope="module")
def free(fit, tmp_path_factory):
    return fit(tmp_path_factory.mktemp("free"))


@pytest.fixture(scope="module")
def least_bytes(fit, tmp_path_factory, free):
    """Memory of the leanest plan, which streams the weights."""
    ample = fit(tmp_path_factory.mktemp("ample"), num_steps=1, vram_budget=free.reserved / 2**30, weights="stream")
    assert ample.losses == pytest.approx(free.losses[:1], rel=1e-3)
    return ample.least_bytes


def check_within(found, budget, free):
    assert found.reserved <= budget
    assert found.losses == pytest.approx(free.losses, rel=1e-3)
    memory = next(status for status in found.statuses if status.name == "device memory")
    assert "capped at vram_budget" in memory.reason


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_whole_run_stays_within_its_budget(fit, tmp_path, free, share):
    budget = int(share * free.reserved)
    check_within(fit(tmp_path, vram_budget=budget / 2**30), budget, free)


def test_a_step_whose_backward_runs_out_of_memory_is_repeated_within_the_budget(fit, tmp_path, free):
    budget = int(0.4 * free.reserved)
    check_within(fit(tmp_path, vram_budget=budget / 2**30, runs_out=True), budget, free)


def test_a_run_with_streamed_weights_stays_within_the_memory_of_its_leanest_plan(fit, tmp_path, free, least_bytes):
    found = fit(tmp_path, vram_budget=least_bytes / 2**30, weights="stream")
    check_within(found, least_bytes, free)
    # The budget is tight: less than a fifth of the memory of a run without one.
    assert least_bytes < 0.2 * free.reserved


def test_an_infeasible_budget_is_refused_before_the_first_step(fit, tmp_path, least_bytes):
    with pytest.raises(OptionError, match="leanest plan") as refused:
        fit(tmp_path, vram_budget=0.35 * least_bytes / 2**30, weights="stream", mlp_tiles=1)
    (gib,) = re.findall(r"takes about (\S+) GiB", str(refused.value))
    assert float(gib) == pytest.approx(least_bytes / 2**30, rel=0.02)


def test_a_budget_that_cannot_hold_the_model_ends_in_an_error_that_names_it(fit, tmp_path):
    with pytest.raises(DeviceMemoryError, match=r"ran out of memory on cuda:0.*vram_budget 0\.3 GiB"):
        fit(tmp_path, vram_budget=0.3, weights="resident")


def test_a_budget_that_only_tiles_can_keep(fit, tmp_path):
    budget = 0.45
    with pytest.raises(OptionError, match="leanest plan"):
        fit(tmp_path, config=WIDE, vram_budget=budget, mlp_tiles=1)
    found = fit(tmp_path, config=WIDE, vram_budget=budget)
    free = fit(tmp_path, config=WIDE)
    check_within(found, budget * 2**30, free)
    assert (free.num_tiles, found.num_tiles) == (1, 8)
