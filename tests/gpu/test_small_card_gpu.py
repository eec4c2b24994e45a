"""A model whose weights are streamed loads on a card that is smaller than it, with the weights and the losses of a
model that was loaded on the device.
"""

import gc

import pytest
import torch
from lightning.pytorch import Callback

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.hf.expert_nf4_tensor import ExpertsNF4
from lightning_fastft.hf.families import decoder_layers
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.packs import make_documents
from tests.support.sizes import tiny_qwen3
from tests.support.training_parts import quiet_trainer

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.filterwarnings("ignore::UserWarning")]

DEVICE, MIB = torch.device("cuda", 0), 2**20
NUM_LAYERS, NUM_STEPS = 16, 3
DENSE = tiny_qwen3(
    vocab=8192, width=1024, inner=4096, layers=NUM_LAYERS, heads=8, key_heads=8, head_width=128, positions=1024
)
MIXTURE = DENSE | {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
}  # fmt: skip
UNTIED = {"tie_word_embeddings": False}
# What is loaded: configuration, where it comes from, the option of FineTuner.
CASES = {
    "random, nf4": (DENSE | UNTIED, "random", "nf4"),
    "bf16 files, nf4": (DENSE | UNTIED, "bf16 files", "nf4"),
    "bf16 files, nf4, tied": (DENSE | {"tie_word_embeddings": True}, "bf16 files", "nf4"),
    "bf16 files of experts, nf4": (MIXTURE | UNTIED, "bf16 files", "nf4"),
    "nf4 files": (DENSE | UNTIED, "nf4 files", None),
    "bf16 files": (DENSE | UNTIED, "bf16 files", None),
    "given on the host": (DENSE | UNTIED, "given", None),
}


class Measured(FineTuner):
    """Records the most memory on the device while the model is built."""

    def configure_model(self):
        super().configure_model()
        self.load_bytes = torch.cuda.max_memory_allocated()


class Losses(Callback):
    def __init__(self):
        self.values, self.place_bytes = [], 0

    def on_train_start(self, trainer, pl_module):
        self.place_bytes = torch.cuda.max_memory_allocated()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.values.append(float(outputs["loss"]))


def model_source(kind, config, folder):
    """Return the first argument of FineTuner, and its option init."""
    if kind == "random":
        return config, "random"
    if not (folder / "config.json").exists():
        quantization = "nf4" if kind == "nf4 files" else None
        source = ModelSource(config, init="random")
        model = build_model(source, device=DEVICE, dtype=torch.bfloat16, quantization=quantization)
        model.save_pretrained(folder)
    if kind == "given":
        return build_model(ModelSource(str(folder)), device=torch.device("cpu"), dtype=torch.bfloat16), "pretrained"
    return str(folder), "pretrained"


def fit(case, folder, *, policy="recompute", **activations):
    """Train and return the losses, the frozen state, and the peaks of loading and of placing above the present use."""
    config, kind, quantization = CASES[case]
    source, init = model_source(kind, config, folder / "model")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    options = {} if kind == "given" else {"init": init, "dtype": "bfloat16", "quantization": quantization}
    lora = {"r": 8, "init_lora_weights": False}
    tuner = Measured(source, lora=lora, scheduler="constant", learning_rate=1e-4, **options)
    losses, batch = Losses(), collate(make_documents((500, 400, 100)))
    loader = torch.utils.data.DataLoader([batch] * NUM_STEPS, batch_size=None, collate_fn=lambda batch: batch)
    strategy = FastFTStrategy(activations=OffloadCheckpointing(policy, host_budget=2, **activations))
    trainer = quiet_trainer(folder, accelerator="gpu", strategy=strategy, max_steps=NUM_STEPS, callbacks=[losses])
    trainer.fit(tuner, loader)
    assert {tensor.device.type for tensor in (*tuner.parameters(), *tuner.buffers())} == {"cpu"}
    state = {name: value for name, value in tuner.model.state_dict().items() if "lora_" not in name}
    return losses.values, state, tuner, tuner.load_bytes - before, losses.place_bytes - before


@pytest.mark.parametrize("case", CASES)
def test_a_streamed_model_loads_tensor_by_tensor(case, tmp_path):
    expected, resident_state, _, whole_bytes, _ = fit(case, tmp_path, weights="resident")
    found, state, tuner, load_bytes, place_bytes = fit(case, tmp_path, weights="stream")
    assert state.keys() == resident_state.keys()
    assert all(torch.equal(state[name], value) for name, value in resident_state.items())
    # Experts add in any order.
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found == pytest.approx(expected, rel=1e-3)

    _, kind, quantization = CASES[case]
    layers = decoder_layers(tuner.model.get_base_model())
    frozen = [[item for item in layer.parameters() if not item.requires_grad] for layer in layers]
    # NF4 layers have two bytes for four weights; a dense weight has two bytes.
    largest = max(2 * num_weights(item) for item in frozen[0])
    dense_layer = sum(2 * num_weights(item) for item in frozen[0])
    # One dense tensor while it is quantised; a random model is made layer by layer; dense files are not touched.
    allowed = {"random": 2 * dense_layer, "bf16 files": 2 * largest}.get(kind, 0) if quantization else 0
    assert load_bytes <= allowed + 2 * MIB
    held_layer = sum(getattr(item, "held_bytes", item.nbytes) for item in frozen[0])
    trained = sum(item.nbytes for item in tuner.parameters() if item.requires_grad)
    tied = tuner.model.get_input_embeddings().weight.nbytes if "tied" in case else 0
    # Three slots, adapters, and absmax of NF4, which counts little.
    assert place_bytes <= max(allowed, 4 * held_layer + 2 * trained + tied) + 8 * MIB
    if kind != "given":
        assert whole_bytes > NUM_LAYERS * held_layer > 1.5 * place_bytes


@pytest.mark.parametrize("case", ["bf16 files", "given on the host"])
def test_a_budget_smaller_than_the_model_streams_it_from_the_start(case, tmp_path):
    expected, resident_state, _, _, _ = fit(case, tmp_path, weights="resident")
    budget = 0.45 * 2**30
    assert budget < sum(value.nbytes for value in resident_state.values())
    found, state, _, load_bytes, _ = fit(case, tmp_path, policy="auto", vram_budget=budget / 2**30)
    assert torch.cuda.max_memory_reserved() <= budget
    assert load_bytes <= 2 * MIB
    assert all(torch.equal(state[name], value) for name, value in resident_state.items())
    assert found == pytest.approx(expected, rel=1e-3)


def num_weights(parameter):
    """Return how many weights a tensor has; two of them are in a byte of a packed one."""
    is_packed = getattr(parameter, "quant_state", None) is not None
    return parameter.numel() * (2 if is_packed and not isinstance(parameter, ExpertsNF4) else 1)
