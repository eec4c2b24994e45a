"""A budget of device memory on a GPU: the whole run stays within it, with the losses of a run without one."""

import gc

import pytest
import torch
from lightning.pytorch import Callback

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.memory_error import DeviceMemoryError
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.packs import make_documents
from tests.support.training_parts import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning:lightning.*")]

CONFIG = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
NUM_STEPS = 9


class Peaks(Callback):
    """Keep losses, and the most that was reserved in any step."""

    def __init__(self):
        self.losses, self.reserved, self.statuses = [], 0, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        self.statuses = trainer.strategy.statuses()
        assert all(torch.any(item.grad != 0) for item in pl_module.parameters() if item.requires_grad)


def fit(folder, **activations):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    lora = {"r": 8, "init_lora_weights": False}
    tuner = FineTuner(CONFIG, init="random", dtype="bfloat16", lora=lora, scheduler="constant", learning_rate=1e-4)
    peaks = Peaks()
    batch = collate(make_documents((2000, 1500, 500, 96)))
    loader = torch.utils.data.DataLoader([batch] * NUM_STEPS, batch_size=None, collate_fn=lambda batch: batch)
    strategy = FastFTStrategy(activations=OffloadCheckpointing("auto", host_budget=2, **activations))
    trainer = quiet_trainer(folder, accelerator="gpu", strategy=strategy, max_steps=NUM_STEPS, callbacks=[peaks])
    trainer.fit(tuner, loader)
    return peaks


@pytest.fixture(scope="module")
def free(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("free"))


@pytest.mark.parametrize(("share", "weights"), [(0.5, "auto"), (0.25, "auto"), (0.12, "stream")])
def test_a_whole_run_stays_within_its_budget(tmp_path, free, share, weights):
    budget = int(share * free.reserved)
    found = fit(tmp_path, vram_budget=budget / 2**30, weights=weights)
    assert found.reserved <= budget
    assert found.losses == pytest.approx(free.losses, rel=1e-3)
    memory = next(status for status in found.statuses if status.name == "device memory")
    assert "capped at vram_budget" in memory.reason
    assert torch.cuda.get_per_process_memory_fraction() == 1.0


def test_a_budget_below_what_a_run_needs_ends_in_an_error_that_names_it(tmp_path):
    with pytest.raises(DeviceMemoryError, match=r"ran out of memory on cuda:0.*vram_budget 0\.3 GiB"):
        fit(tmp_path, vram_budget=0.3)
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
