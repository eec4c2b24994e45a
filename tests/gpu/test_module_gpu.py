"""FineTuner on a CUDA device: placement, NF4, dtypes, the fused optimizer, fp16 with a scaler, and no host wait
in a step.
"""

import functools
import itertools

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from lightning_fastft.optim import MuonAdamW
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimizer import FusedAdamW
from tests.support.fine_tuners import CONFIG, LORA, trainable, word_tokenizer
from tests.support.schedule_free import ScheduleFreeSGD
from tests.support.training_parts import VOCAB_SIZE, packed_batches, packed_loader, quiet_trainer

register_strategies()
pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def tuner(**options):
    return FineTuner(CONFIG, init="random", **{"learning_rate": 1e-2, **options})


def gpu_trainer(tmp_path, **options):
    return quiet_trainer(tmp_path, **{"strategy": "fastft", "accelerator": "cuda", **options})


MODES = {
    "full": {},
    "lora": {"lora": LORA},
    "qlora": {"lora": LORA, "quantization": "nf4"},
    "lora_fp32": {"lora": LORA, "dtype": "float32"},
}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_learns_without_a_host_wait_in_its_steps(tmp_path, mode):
    class Guarded(FineTuner):
        def training_step(self, batch, batch_idx):
            torch.cuda.set_sync_debug_mode("error" if self.trainer.global_step else "default")
            return super().training_step(batch, batch_idx)

        def optimizer_step(self, *args, **kwargs):
            super().optimizer_step(*args, **kwargs)
            torch.cuda.set_sync_debug_mode("default")

    module = Guarded(CONFIG, init="random", learning_rate=1e-2, **MODES[mode])
    trainer = gpu_trainer(tmp_path, max_steps=30)
    loader = packed_loader(3)
    before = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    trainer.fit(module, loader)
    after = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    assert after < before - 0.5
    assert type(trainer.optimizers[0]) is (torch.optim.AdamW if mode == "full" else FusedAdamW)
    assert all(group["fused"] for group in trainer.optimizers[0].param_groups if mode == "full")
    base = torch.float32 if mode == "lora_fp32" else torch.bfloat16
    assert module._compute_dtype == base
    assert {parameter.dtype for parameter in trainable(module).values()} == {
        torch.bfloat16 if mode == "full" else torch.float32
    }


@pytest.mark.parametrize("mode", ["full", "qlora"])
@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": functools.partial(MuonAdamW, master_weights=True)},
        {"optimizer": ScheduleFreeSGD, "scheduler": "constant", "learning_rate": 1.0},
    ],
    ids=["muon", "schedule-free"],
)
def test_other_optimizers_step_fused_layers_without_a_host_wait(tmp_path, mode, options):
    class Guarded(FineTuner):
        def optimizer_step(self, *args, **kwargs):
            # The first step makes the state.
            torch.cuda.set_sync_debug_mode("error" if self.trainer.global_step else "default")
            super().optimizer_step(*args, **kwargs)
            torch.cuda.set_sync_debug_mode("default")

    module = Guarded(CONFIG, init="random", **{"learning_rate": 1e-2, **options, **MODES[mode]})
    trainer = gpu_trainer(tmp_path, max_steps=30, callbacks=[FusedKernels()])
    loader = packed_loader(3)
    before = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    trainer.fit(module, loader)
    after = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    assert after < before - 0.2


@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_every_tensor_is_made_on_the_device(tmp_path, init, quantization):
    build_model(ModelSource(CONFIG, init="random"), device=torch.device("cpu"), dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    source = ModelSource(str(tmp_path), init=init)
    model = build_model(source, device=CUDA, dtype=torch.bfloat16, quantization=quantization, seed=4)
    assert {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {CUDA}
    assert torch.isfinite(model(torch.arange(3, 9, device=CUDA)[None]).logits).all()
    again = build_model(source, device=CUDA, dtype=torch.bfloat16, quantization=quantization, seed=4)
    assert all(torch.equal(first, second) for first, second in zip(model.parameters(), again.parameters()))


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_weights_that_are_not_finite_are_refused_in_nf4(tmp_path, value):
    model = build_model(ModelSource(CONFIG, init="random"), device=torch.device("cpu"), dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"layers\.1\.mlp\.up_proj"):
        build_model(ModelSource(str(tmp_path)), device=CUDA, dtype=torch.bfloat16, quantization="nf4")


def test_fp16_trains_with_a_scaler_and_is_refused_without(tmp_path):
    module = tuner(lora=LORA, dtype="float16")
    trainer = gpu_trainer(tmp_path, precision="16-mixed", max_steps=30, gradient_clip_val=1.0)
    loader = packed_loader(3)
    before = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    trainer.fit(module, loader)
    assert trainer.validate(module, loader, verbose=False)[0]["val_loss"] < before - 0.3
    assert {parameter.dtype for parameter in module.model.parameters()} == {torch.float16, torch.float32}
    with pytest.raises(OptionError, match="16-mixed"):
        gpu_trainer(tmp_path).fit(tuner(lora=LORA, dtype="float16"), loader)


def test_fp32_on_the_device_equals_float64_to_fp32_accuracy(tmp_path):
    module = tuner(dtype="float32")
    batches = packed_batches(2, seed=9)
    found = gpu_trainer(tmp_path).validate(module, DataLoader(batches, batch_size=None), verbose=False)[0]["val_loss"]
    model = module.model.double().cpu().eval()
    nll, count = 0.0, 0
    for batch in batches:
        offsets = batch.context.start_host_S1.tolist()
        for start, end in itertools.pairwise(offsets):
            ids = batch["input_ids"][:, start:end].cpu()
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, :-1]
            nll += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
    assert found == pytest.approx(nll / count, rel=1e-6)


def test_qlora_resumes_and_generates_on_either_device(tmp_path):
    module = tuner(lora=LORA, quantization="nf4", tokenizer=word_tokenizer())
    trainer = gpu_trainer(tmp_path, max_steps=4)
    trainer.fit(module, packed_loader(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    seed = module._seed
    torch.manual_seed(seed)
    again = tuner(lora=LORA, quantization="nf4", tokenizer=word_tokenizer())
    gpu_trainer(tmp_path, max_steps=4).fit(again, packed_loader(2), ckpt_path=tmp_path / "a.ckpt")
    for name, parameter in trainable(module).items():
        assert torch.equal(trainable(again)[name].cpu(), parameter.cpu()), name
    module.cuda()
    assert len(module.generate(["w5 w6", "w7"], max_new_tokens=4, do_sample=False)) == 2
    assert module.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_frozen_weights_lie_next_to_their_adapters_while_it_trains(tmp_path, cuda_graphs):
    counts = []

    def count(trainer, pl_module, *_):
        counts.append(
            sum(parameter.untyped_storage().nbytes() != parameter.nbytes for parameter in pl_module.model.parameters())
        )

    losses = []
    for callbacks in ([], [FusedKernels(cuda_graphs=cuda_graphs)]):
        torch.manual_seed(0)
        module = tuner(lora=LORA, dtype="float32")
        looks = LambdaCallback(on_train_batch_end=count, on_train_end=count)
        trainer = gpu_trainer(tmp_path, max_steps=12, callbacks=[*callbacks, looks])
        trainer.fit(module, packed_loader(3))
        losses.append(trainer.validate(module, packed_loader(3), verbose=False)[0]["val_loss"])
    weight_buffer = 7 * CONFIG["num_hidden_layers"]
    assert counts == [0] * 13 + [weight_buffer] * 12 + [0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
