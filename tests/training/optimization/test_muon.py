"""MuonAdamW: matrices of layers by torch's Muon, all else by AdamW, in runs as with any other optimizer."""

import functools

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fastft.callbacks.finite_guard import FiniteGuard
from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.core.errors import OptionError
from lightning_fastft.core.optimizer_twin import measure_state
from lightning_fastft.estimate.optimizer_cost import meter_optimizer
from lightning_fastft.optim import MuonAdamW
from lightning_fastft.strategies.packed_steps import missing_optimizer_bytes
from lightning_fastft.training.fine_tuner import FineTuner
from lightning_fastft.training.optimization.choice import call_factory
from lightning_fastft.training.optimization.schedules import RunSchedule
from tests.support.fine_tuners import trainable, tuner
from tests.support.muon import assert_as_near, exact_iterations
from tests.support.sizes import tiny_qwen3
from tests.support.tiny_models import build_tiny
from tests.support.training_parts import VOCAB_SIZE, packed_batches, quiet_trainer

MASTERS = {"dtype": "bfloat16", "optimizer": functools.partial(MuonAdamW, master_weights=True)}
UNTIED = tiny_qwen3(vocab=VOCAB_SIZE, width=32, inner=48, tie_word_embeddings=False)


class TwoOptimizers(torch.optim.Optimizer):
    """Muon and AdamW of torch over parameters that are chosen by name: no state of its own, for runs without saves."""

    def __init__(self, module, *, lr, weight_decay):
        named = trainable(module)
        matrices = [name for name in named if named[name].ndim == 2 and "embed" not in name and "lm_head" not in name]
        vectors = [name for name in named if named[name].ndim < 2]
        tokens = [name for name in named if name not in {*matrices, *vectors}]
        self.parts = [
            torch.optim.Muon(
                [named[name] for name in matrices], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW([named[name] for name in tokens], lr=lr, weight_decay=weight_decay),
            torch.optim.AdamW([named[name] for name in vectors], lr=lr, weight_decay=0.0),
        ]
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for part in self.parts:
            part.step()
        return loss


def make_tuner(config=UNTIED, **options):
    options = {"learning_rate": 1e-2, "weight_decay": 0.1, "optimizer": MuonAdamW, "dtype": "float32", **options}
    return FineTuner(config, init="random", **options)


def fit(module, folder, *, num_steps=5, callbacks=(), ckpt_path=None, **options):
    seed_everything(7, verbose=False)
    trainer = quiet_trainer(
        folder, max_steps=num_steps, callbacks=list(callbacks), gradient_clip_val=0.5, strategy="fastft", **options
    )
    trainer.fit(module, DataLoader(packed_batches(1) * 12, batch_size=None), ckpt_path=ckpt_path)
    return trainer


def assert_same_weights(one, other):
    expected = trainable(other)
    assert [name for name, each in trainable(one).items() if not torch.equal(each, expected[name])] == []


def test_a_run_has_the_weights_of_both_optimizers_with_one_schedule(tmp_path):
    module, twin, exact = make_tuner(), make_tuner(), make_tuner()
    health = GradientHealth(num_steps=4)
    trainer = fit(module, tmp_path, callbacks=[health])

    def configure(run, make):
        optimizer = TwoOptimizers(run, lr=1e-2, weight_decay=0.1)
        share = make()["lr_scheduler"]["scheduler"].lr_lambdas[0]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": RunSchedule(optimizer, share), "interval": "step"},
        }

    for run in (twin, exact):
        run.configure_optimizers = functools.partial(configure, run, run.configure_optimizers)
    fit(twin, tmp_path)
    with exact_iterations():
        fit(exact, tmp_path)
    for weights in zip(*(trainable(each).values() for each in (module, twin, exact)), strict=True):
        assert_as_near(*weights)
    assert "moved" in health.status().reason
    names = {parameter: name for name, parameter in trainable(module).items()}
    kinds = {names[each]: group["use_muon"] for group in trainer.optimizers[0].param_groups for each in group["params"]}
    assert kinds.keys() == trainable(module).keys()
    assert all(use_muon == name.endswith("_proj.weight") for name, use_muon in kinds.items())


@pytest.mark.parametrize("options", [{}, {"lora": {"r": 4}, "weight_decay": None}, {"dtype": "bfloat16"}, MASTERS])
def test_a_run_is_resumed_to_the_bit(tmp_path, options):
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    whole, resumed = make_tuner(**options), make_tuner(**options)
    first = fit(whole, tmp_path, callbacks=[keep], enable_checkpointing=True)
    second = fit(resumed, tmp_path / "b", ckpt_path=tmp_path / "step=3.ckpt")
    assert_same_weights(resumed, whole)
    for one, other in zip(trainable(resumed).values(), trainable(whole).values()):
        states = [run.optimizers[0].state[each] for run, each in ((second, one), (first, other))]
        assert states[0].keys() == states[1].keys() != set()
        assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
        assert not options.get("optimizer") or {each.dtype for each in states[0].values()} == {torch.float32}


def test_adapters_of_embeddings_and_of_the_output_layer_are_stepped_by_adamw(tmp_path):
    module = make_tuner(
        weight_decay=None, lora={"r": 4, "target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}
    )
    trainer = fit(module, tmp_path, num_steps=1)
    names = {parameter: name for name, parameter in trainable(module).items()}
    for group in trainer.optimizers[0].param_groups:
        assert {group["use_muon"] for each in group["params"]} == {"q_proj" in names[each] for each in group["params"]}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_step_is_skipped_and_counted(tmp_path, accumulate):
    class Spoil(Callback):
        def on_after_backward(self, trainer, pl_module):
            if trainer.global_step == 1:
                next(iter(trainable(pl_module).values())).grad.view(-1)[0] = float("nan")

    guard = FiniteGuard(unsupported="wait")
    module = make_tuner()
    with pytest.warns(UserWarning, match="step 2 was skipped"):
        fit(module, tmp_path, callbacks=[Spoil(), guard], accumulate_grad_batches=accumulate)
    assert guard.num_skipped == 1
    assert all(torch.isfinite(each).all() for each in trainable(module).values())


def test_experts_in_one_tensor_are_stepped_one_by_one(tmp_path):
    module = make_tuner(build_tiny("qwen3_moe").config, weight_decay=None)
    trainer = fit(module, tmp_path, num_steps=2)
    names = {parameter: name for name, parameter in trainable(module).items()}
    groups = trainer.optimizers[0].param_groups
    assert any("experts" in names[each] for group in groups if group["use_muon"] for each in group["params"])
    torch.manual_seed(5)
    together = torch.nn.Parameter(torch.randn(10, 8, 6))
    alone, exact = ([torch.nn.Parameter(each.clone()) for each in together.detach()] for _ in range(2))
    single, exact_single = (
        torch.optim.Muon(each, lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw") for each in (alone, exact)
    )
    optimizer = MuonAdamW([together], lr=0.1, weight_decay=0.01)
    for _ in range(3):
        together.grad = torch.randn(10, 8, 6)
        for weight, gradient in zip([*alone, *exact], [*together.grad] * 2):
            weight.grad = gradient
        optimizer.step()
        single.step()
        with exact_iterations():
            exact_single.step()
    for weights in zip(together, alone, exact, strict=True):
        assert_as_near(*weights)


def test_matrices_of_one_shape_are_stepped_at_once_and_no_more_than_fit(monkeypatch):
    def count(num_matrices):
        weights = [torch.nn.Parameter(torch.ones(8, 6)) for _ in range(num_matrices)]
        for weight in weights:
            weight.grad = torch.ones(8, 6)
        with torch.profiler.profile() as profile:
            MuonAdamW(weights).step()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::baddbmm")

    assert count(12) == count(1) == 10
    monkeypatch.setattr("lightning_fastft.training.optimization.muon._MAX_VALUES", 100)
    assert count(12) == 60


def test_groups_that_are_added_are_divided_too():
    weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((4, 3), (4,), (1, 5), (6, 1, 4), (7, 3), (3, 3, 3))]
    optimizer = MuonAdamW([{"params": weights[:3], "lr": 0.5}, {"params": weights[3]}])
    assert [(len(group["params"]), group["use_muon"], group["lr"]) for group in optimizer.param_groups] == [
        (1, True, 0.5), (2, False, 0.5), (1, False, 1e-3),
    ]  # fmt: skip
    optimizer.add_param_group({"params": weights[4:], "use_muon": False})
    assert optimizer.param_groups[-1]["params"] == weights[4:]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert [sorted(optimizer.state[weight]) for weight in weights] == [
        ["momentum_buffer"], *[["exp_avg", "exp_avg_sq", "step"]] * 5,
    ]  # fmt: skip


def test_masters_take_steps_too_small_for_bf16_as_fp32_weights_do():
    def weights(dtype):
        torch.manual_seed(3)
        return [torch.nn.Parameter(torch.randn(shape).bfloat16().to(dtype)) for shape in ((8, 6), (5,), (2, 3))]

    narrow, wide, lost = weights(torch.bfloat16), weights(torch.float32), weights(torch.bfloat16)
    # One parameter is in fp32 already.
    narrow[2] = torch.nn.Parameter(narrow[2].float())
    runs = [MuonAdamW(narrow, lr=1e-4, master_weights=True), MuonAdamW(wide, lr=1e-4), MuonAdamW(lost, lr=1e-4)]
    for number in range(40):
        for place, one in enumerate(wide):
            torch.manual_seed(place)
            gradient = torch.randn(one.shape).bfloat16()
            for each in (narrow[place], one, lost[place]):
                each.grad = None if number == 7 and place == 1 else gradient.to(each.dtype)
        for run in runs:
            run.step()
    for one, other in zip(narrow, wide):
        state = runs[0].state[one]
        assert torch.equal(state.get("master", one), other)
        assert torch.equal(one, other.to(one.dtype))
        # Nothing holds its gradient in fp32.
        assert "master" not in state or state["master"].grad is None
    assert "master" not in runs[0].state[narrow[2]]
    assert any(not torch.equal(one, other.bfloat16()) for one, other in zip(lost, wide))


def test_a_loop_of_ones_own_loads_masters_with_all_bits():
    weights, others = ([torch.nn.Parameter(torch.ones(shape).bfloat16()) for shape in ((4, 3), (5,))] for _ in range(2))
    saving, loading = (MuonAdamW(each, lr=1e-4, master_weights=True) for each in (weights, others))
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.3)
    saving.step()
    loading.load_state_dict(saving.state_dict())
    for weight, other in zip(weights, others):
        saved, loaded = saving.state[weight], loading.state[other]
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(loaded[name], value) and loaded[name] is not value for name, value in saved.items())


def test_undecayed_matrices_are_stepped_by_adamw():
    # gpt-oss holds the biases of its experts as one matrix.
    weight, bias = (torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2))
    optimizer = call_factory(
        MuonAdamW, [weight, bias], learning_rate=None, weight_decay=None, wants_masters=False, model_name="a",
        undecayed=[bias],
    )  # fmt: skip
    assert {group["use_muon"]: group["params"] for group in optimizer.param_groups} == {True: [weight], False: [bias]}


def test_the_step_is_metered_on_the_meta_device():
    matrix, rows = (torch.nn.Parameter(torch.ones(64, 32)) for _ in range(2))
    optimizer = MuonAdamW([matrix, rows])
    optimizer.use_adamw([rows])
    sizes = [4 * 64 * 32, 2 * 4 * 64 * 32]
    assert [each.device for each in measure_state(optimizer)] == sizes
    assert missing_optimizer_bytes([optimizer]) == sum(sizes)
    on_meta = [torch.nn.Parameter(torch.ones(64, 32, device="meta")) for _ in range(2)]
    cost = meter_optimizer(MuonAdamW, on_meta, default_state_bytes=1, of_tokens=on_meta[1:])
    assert cost.state_bytes == sum(sizes)
    assert meter_optimizer(MuonAdamW, on_meta, default_state_bytes=1).state_bytes == 2 * sizes[0]
    assert sum(kernel.flops for kernel in cost.kernels) > 0
    narrow = [torch.nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16, device="meta"))]
    with_masters = functools.partial(MuonAdamW, master_weights=True)
    assert meter_optimizer(with_masters, narrow, default_state_bytes=1).state_bytes == 2 * sizes[0]


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"betas": (0.9, 2.0)}, {"ns_steps": 100}, {"momentum": -0.1}])
def test_wrong_numbers_are_refused_with_their_names(tmp_path, options):
    (name,) = options
    module = tuner("full", optimizer=functools.partial(MuonAdamW, **options), learning_rate=None)
    with pytest.raises(OptionError, match=rf"^{name}"):
        fit(module, tmp_path)
