"""Shared prompts, images that see both directions, and tuners on a GPU: each backend against float64, equal bits in
every run, and no host sync in a step.
"""

import itertools

import pytest
import torch

from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.lora import adapters_off
from lightning_fastft.kernels.attention.op import packed_attention
from lightning_fastft.kernels.attention.reference import masked_attention
from lightning_fastft.packing.collate import collate
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.packing.spans import BidirectionalSpans
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.training.policy import PolicyTuner
from lightning_fastft.training.preference import PreferenceTuner
from tests.support.packs import make_groups
from tests.support.tuners import CONFIG, LORA

pytestmark = pytest.mark.gpu

LENGTHS, PREFIXES = (300, 130, 1, 64, 257, 37, 200), (-1, 0, 0, 0, -1, 4, -1)
SCALE, WINDOW = 0.125, 100
SPANS = ((10, 266), (290, 300), (500, 750))


def make_context(spans):
    """A pack with these spans, or with prefixes if there are none."""
    labels = torch.full((sum(LENGTHS),), -100)
    context = BatchContext(lengths=LENGTHS, label_T=labels, num_items=1, prefixes=None if spans else PREFIXES)
    if spans:
        context.spans = BidirectionalSpans.build(spans, in_windows_only=False, document_T=context.document_T)
    return context.to("cuda")


def attention_and_gradients(backend, dtype, *, window=None, has_sinks=False, spans=()):
    """Output and gradients of one backend, and of the definition in float64."""
    context = make_context(spans)
    draws = torch.Generator().manual_seed(0)
    shapes = [(4, 64), (2, 64), (2, 64)]
    inputs = [torch.randn(sum(LENGTHS), *shape, generator=draws).to(dtype).cuda().requires_grad_() for shape in shapes]
    sink = torch.randn(4, generator=draws).cuda() if has_sinks else None
    weight = torch.randn(sum(LENGTHS), 4, 64, generator=draws).cuda()
    out = packed_attention(
        *inputs, context=context, scale=SCALE, window=window, softcap=None, sink_H=sink, backend=backend
    )
    found = [out, *torch.autograd.grad((out * weight.to(dtype)).sum(), inputs)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    true = masked_attention(
        *exact, mask_TT=context.dense_mask(window=window)[0, 0], scale=SCALE,
        sink_H=None if sink is None else sink.double(),
    )  # fmt: skip
    return found, [true, *torch.autograd.grad((true * weight.double()).sum(), exact)]


def error(value, truth):
    return float((value.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("varlen", torch.bfloat16), ("varlen", torch.float16), ("flex", torch.bfloat16), ("sdpa", torch.float32)],
)
def test_backends_see_prefixes_as_the_definition(backend, dtype, window):
    found, truth = attention_and_gradients(backend, dtype, window=window)
    plain, _ = attention_and_gradients("reference", dtype, window=window)
    for ours, theirs, true in zip(found, plain, truth):
        assert error(ours, true) <= max(2 * error(theirs, true), 1e-5)


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("auto", torch.bfloat16), ("sdpa", torch.float16), ("sdpa", torch.float32), ("flex", torch.bfloat16)],
)
def test_backends_see_the_end_of_a_span_as_the_definition(backend, dtype, window):
    found, truth = attention_and_gradients(backend, dtype, window=window, spans=SPANS)
    plain, _ = attention_and_gradients("reference", dtype, window=window, spans=SPANS)
    for ours, theirs, true in zip(found, plain, truth):
        assert error(ours, true) <= max(2 * error(theirs, true), 1e-5)


def test_varlen_sinks_with_prefixes():
    found, truth = attention_and_gradients("varlen", torch.bfloat16, has_sinks=True)
    plain, _ = attention_and_gradients("reference", torch.bfloat16, has_sinks=True)
    for ours, theirs, true in zip(found, plain, truth):
        assert error(ours, true) <= max(2 * error(theirs, true), 1e-5)


def test_gradients_of_a_prefix_are_the_same_in_every_run():
    runs = [attention_and_gradients("varlen", torch.bfloat16)[0] for _ in range(3)]
    for one, other in itertools.pairwise(runs):
        # Flash attention's own gradient of queries may depend on the order of its blocks; keys and values do not.
        assert all(torch.equal(x, y) for x, y in zip(one[2:], other[2:]))


def make_on_gpu(tuner_class, **options):
    torch.manual_seed(0)
    config = {**CONFIG, "hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    options |= {"init": "random", "dtype": "bfloat16", "lora": LORA, "reference": "adapters_off"}
    tuner = tuner_class(config, **options).to("cuda")
    tuner.configure_model()
    tuner.log = lambda *_, **__: None
    return tuner


GROUPS = {PreferenceTuner: ((200, 40, 90), (64, 129, 7), (1, 30, 31)), PolicyTuner: ((150, 20, 40, 60), (33, 9, 70))}


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("tuner_class", [PreferenceTuner, PolicyTuner])
def test_a_step_trains_and_never_waits(tuner_class, is_fused):
    tuner, patcher = make_on_gpu(tuner_class), ModelPatcher()
    if is_fused:
        from lightning_fastft.fused.install import install_fused_layers

        install_fused_layers(tuner.model, patcher)
    install_packed_training(tuner, patcher)
    try:
        batches = [collate(make_groups(GROUPS[tuner_class], seed=seed)).pin_memory() for seed in range(3)]
        for number, batch in enumerate(batches):
            moved = batch.to("cuda")
            torch.cuda.set_sync_debug_mode("error" if number else "default")
            try:
                loss = tuner.training_step(moved, 0)
                loss.backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert moved.context.reads.keys() == {"varlen"}
        assert loss.isfinite()
        grads = [parameter.grad for parameter in tuner.parameters() if parameter.requires_grad]
        assert all(grad is not None and grad.isfinite().all() for grad in grads)
        assert any(float(grad.abs().max()) > 0 for grad in grads)
    finally:
        patcher.undo()


def test_shared_prompts_equal_copies_within_bf16():
    tuner, patcher = make_on_gpu(PreferenceTuner), ModelPatcher()
    install_packed_training(tuner, patcher)
    try:
        documents = make_groups(GROUPS[PreferenceTuner])
        with torch.no_grad():
            shared, copied = (
                tuner._read_log_probs(collate(documents, shares_prompts=shares).to("cuda")) for shares in (True, False)
            )
            with adapters_off(tuner.model):
                base = tuner._read_log_probs(collate(documents).to("cuda"))
        count = sum(sum(lengths[1:]) for lengths in GROUPS[PreferenceTuner])
        difference = (shared - copied)[:count].abs().max()
        assert difference < 0.05 * (shared - base)[:count].abs().max().clamp(min=1.0)
    finally:
        patcher.undo()


def test_fused_kernels_train_pairs_through_the_trainer(tmp_path):
    from lightning_fastft.strategies.single_device import FastFTStrategy
    from lightning_fastft.training.datamodule import PackedDataModule
    from tests.support.training_parts import quiet_trainer

    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (64, 3, 12), generator=draws).tolist()
    rows = [{"prompt_ids": a, "completion_ids": [b, c], "rewards": [1.0, 0.0]} for a, b, c in ids]
    tuner = PolicyTuner({**CONFIG, "head_dim": 64}, init="random", dtype="bfloat16", lora=LORA)
    data = PackedDataModule(rows, max_tokens=256, num_workers=0, cache_dir=None, num_proc=1)
    trainer = quiet_trainer(
        tmp_path, accelerator="gpu", strategy=FastFTStrategy(), callbacks=[FusedKernels()], max_steps=4
    )
    trainer.fit(tuner, data)
    assert trainer.global_step == 4
