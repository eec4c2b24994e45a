"""FusedKernels(base_compute=...): what the table says, that plans change no bit, and that a run leaves nothing
behind.
"""

import functools

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.errors import OptionError
from lightning_fastft.fused.fp8_base import FP8_ATTRIBUTE
from lightning_fastft.strategies.single_device import FastFTStrategy
from tests.callbacks.test_fused_kernels import CONFIG, MODES, count_own, fit, is_plain, movement, trained, tuner
from tests.support.training_parts import packed_batches, packed_loader, quiet_trainer

ACTIVE = ("fp8 products", "active", "8 products of 2 layers in e4m3, in plain PyTorch", "")


def has_fp8(module):
    return any(FP8_ATTRIBUTE in vars(part) for part in module.modules())


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_a_fit_in_fp8_moves_what_is_trained_nearly_as_one_without_it(tmp_path, mode):
    moves = {}
    for base in ("model_dtype", "fp8_reference"):
        # Small steps add up gradients of one place; with large ones, runs that differ in a last digit end in different
        # places.
        optimizer = functools.partial(torch.optim.SGD, lr=1e-3)
        callback = FusedKernels(base_compute=base)
        module = tuner({**CONFIG, "initializer_range": 0.05}, seed=6, **MODES[mode], optimizer=optimizer)
        with count_own() as own:
            before, after, table = fit(module, tmp_path, callback)
        assert not own
        assert (ACTIVE in table) is (base == "fp8_reference")
        assert (ACTIVE in callback.status()) is (base == "fp8_reference")
        moves[base] = movement(before, after)
        assert is_plain(module)
        assert not has_fp8(module)
    found, expected = (
        torch.cat([value.flatten() for _, value in sorted(moves[base].items())])
        for base in ("fp8_reference", "model_dtype")
    )
    # The limits of the ruler's judge for such rows.
    assert 0.98 < torch.cosine_similarity(found, expected, dim=0) < 0.9999
    assert abs(found.norm() / expected.norm() - 1) < 0.1


def test_without_a_device_that_has_fp8_it_is_inactive_and_changes_no_bit(tmp_path):
    found = {}
    for base in ("model_dtype", "fp8"):
        _, found[base], table = fit(tuner(**MODES["lora in bf16"]), tmp_path, FusedKernels(base_compute=base))
    reason = "fp8 products need a CUDA device of compute capability 8.9 or higher, and the weights are on cpu"
    assert ("fp8 products", "inactive", f"{reason}; products run in the dtype of the model", "") in table
    assert all(torch.equal(value, found["fp8"][name]) for name, value in found["model_dtype"].items())


@pytest.mark.parametrize("mode", ["lora", "qlora", "full"])
def test_activation_policies_change_no_bit_in_fp8(tmp_path, mode):
    found = {}
    for policy in ("keep", "recompute", "offload"):
        activations = OffloadCheckpointing(policy, **({"host_budget": 1.0} if policy == "offload" else {}))
        callback = FusedKernels(base_compute="fp8_reference")
        _, found[policy], table = fit(
            tuner(**MODES[mode]),
            tmp_path,
            callback,
            strategy=FastFTStrategy(activations=activations),
            accelerator="auto",
        )
        assert ACTIVE in table
    assert all(torch.equal(value, found[policy][name]) for policy in found for name, value in found["keep"].items())


@pytest.mark.parametrize("mode", ["lora", "qlora"])
def test_streamed_weights_compute_in_fp8_with_the_same_bits(tmp_path, mode):
    found = {}
    for weights in ("resident", "stream"):
        options = {"weights": "stream", "host_budget": 1.0} if weights == "stream" else {}
        strategy = FastFTStrategy(activations=OffloadCheckpointing("recompute", **options))
        callback = FusedKernels(base_compute="fp8_reference")
        _, found[weights], table = fit(tuner(**MODES[mode]), tmp_path, callback, strategy=strategy, accelerator="auto")
        assert ACTIVE in table
    assert all(torch.equal(value, found["stream"][name]) for name, value in found["resident"].items())


class Unseen(torch.optim.SGD):
    """Writes weights as bitsandbytes does: no version counter shows it."""

    def step(self, closure=None):
        loss = closure()
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.data.add_(parameter.grad, alpha=-self.param_groups[0]["lr"])
        return loss


@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_are_quantised_after_steps_that_no_version_counter_shows(tmp_path, accumulate):
    found = {}
    for optimizer in (torch.optim.SGD, Unseen):
        module = tuner(**MODES["full"], optimizer=functools.partial(optimizer, lr=0.2))
        fused = FusedKernels(base_compute="fp8_reference")
        _, found[optimizer], table = fit(module, tmp_path, fused, accumulate_grad_batches=accumulate)
        assert ACTIVE in table
    assert all(torch.equal(value, found[Unseen][name]) for name, value in found[torch.optim.SGD].items())


@pytest.mark.parametrize("hooks", [("start", "end"), ("epoch_start", "end")])
def test_weights_that_are_swapped_for_a_validation_are_quantised(tmp_path, hooks):
    """Callbacks swap averages in through .data, which no version counter shows."""

    class Swap(Callback):
        def __init__(self, *, is_seen):
            self.is_seen, self.losses = is_seen, []

        def swap(self, trainer, pl_module):
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    (parameter if self.is_seen else parameter.data).neg_()

        def on_validation_epoch_end(self, trainer, pl_module):
            self.losses.append(float(trainer.callback_metrics["val_loss"]))

    for hook in hooks:
        setattr(Swap, f"on_validation_{hook}", Swap.swap)
    found = {}
    for is_seen in (True, False):
        module = tuner(**MODES["full"], optimizer=functools.partial(torch.optim.SGD, lr=0.2))
        swap = Swap(is_seen=is_seen)
        callbacks = (FusedKernels(base_compute="fp8_reference"), swap)
        _, weights, table = fit(module, tmp_path, *callbacks, val_check_interval=1, num_sanity_val_steps=0)
        assert ACTIVE in table
        found[is_seen] = swap.losses, weights
    assert found[False][0] == found[True][0]
    assert all(torch.equal(value, found[False][1][name]) for name, value in found[True][1].items())


def test_trained_weights_are_quantised_before_the_first_step_is_measured(tmp_path):
    """A plan takes what the first forward allocates for saved activations."""
    held = []

    class Look(Callback):
        def on_train_batch_start(self, trainer, pl_module, *_):
            weights = [weight for part in pl_module.modules() for weight in vars(part).get(FP8_ATTRIBUTE, ())]
            tensors = [tensor for weight in weights for tensor in (*weight.memory(), *weight.owner.memory())]
            held.append({tensor.data_ptr(): tensor.nbytes for tensor in tensors})

    module = tuner(**MODES["full"])
    trainer = quiet_trainer(
        tmp_path,
        strategy="fastft",
        callbacks=[FusedKernels(base_compute="fp8_reference"), Look()],
        max_steps=3,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, packed_loader(3))
    assert len(held) == 3
    assert len(held[0]) == 3 * 8 + 1
    assert all(each == held[0] for each in held)


def test_a_resumed_fit_of_trained_weights_ends_with_the_same_bits(tmp_path):
    def run(ckpt_path=None):
        module = tuner(**MODES["full"])
        saving = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
        callbacks = [FusedKernels(base_compute="fp8_reference"), saving]
        trainer = quiet_trainer(
            tmp_path, strategy="fastft", callbacks=callbacks, max_steps=4, enable_checkpointing=True
        )
        # A plain loader begins anew when a run is resumed, so all packs are equal.
        loader = torch.utils.data.DataLoader(packed_batches(1) * 4, batch_size=None)
        trainer.fit(module, loader, packed_loader(1), ckpt_path=ckpt_path)
        return trained(module)

    whole = run()
    resumed = run(tmp_path / "step=2.ckpt")
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())


@pytest.mark.parametrize("mode", ["lora", "full"])
def test_everything_is_undone_after_an_exception(tmp_path, mode):
    callback, module = FusedKernels(base_compute="fp8_reference"), tuner(**MODES[mode])

    def fail(*_, **__):
        raise RuntimeError("planted")

    module.on_train_batch_end = fail
    with pytest.raises(RuntimeError, match="planted"):
        fit(module, tmp_path, callback)
    assert is_plain(module)
    assert not has_fp8(module)
    assert ACTIVE in callback.status()


@pytest.mark.parametrize("value", ["bf16", "FP8", None, True])
def test_other_values_are_refused(value):
    with pytest.raises(OptionError, match="base_compute must be one of 'model_dtype', 'fp8', 'fp8_reference'"):
        FusedKernels(base_compute=value)
