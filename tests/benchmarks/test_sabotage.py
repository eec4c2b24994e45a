"""Systems that would look fast for a wrong reason get no row: each sabotage here is refused, and by the check
that is there for it.
"""

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening

from benchmarks.ruler import report
from benchmarks.ruler.arms import ours, plain
from benchmarks.ruler.building import build
from benchmarks.ruler.cases import Case, CaseLog
from benchmarks.ruler.workloads import WORKLOADS, Pack, WorkloadFiles

TINY = WORKLOADS["tiny"]
NUM_TENSORS = 28
NUM_PADDING = 40


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the built workload with the reference gradients of the honest plain arm."""
    root = tmp_path_factory.mktemp("sabotage")
    build(TINY, root=root, device="cpu", dtype=torch.float32)
    found = WorkloadFiles(root, TINY)
    plain.run(
        [Case("tiny", "plain", "recompute", num_warmup=1, num_steps=0)],
        files=found,
        log=CaseLog(root / "raw.jsonl"),
        device="cpu",
    )
    return found


@pytest.fixture
def reason(files, tmp_path):
    """Return a function that runs one case of an arm and returns why it got no row."""

    def run(arm, *, is_judged=True):
        case = Case(
            "tiny", arm.__name__.rpartition(".")[2], "recompute", num_warmup=2, num_steps=3, is_judged=is_judged
        )
        log = tmp_path / "raw.jsonl"
        arm.run([case], files=files, log=CaseLog(log), device="cpu")
        (record,) = report.read_records(log)
        assert record["reason"] or "summary" in record
        assert bool(report.result_rows([record], command="x")) == (not record["reason"])
        return record["reason"]

    return run


@pytest.fixture
def change_batches(monkeypatch):
    """Return a function that puts a change between the collator of the plain arm and its model."""

    own = DataCollatorWithFlattening.__call__
    return lambda change: monkeypatch.setattr(
        DataCollatorWithFlattening, "__call__", lambda self, documents: change(own(self, documents))
    )


@pytest.fixture
def change_model(monkeypatch):
    """Return a function that changes the model of the plain arm after it is loaded."""

    def install(change):
        own = plain.load_model

        def load(*arguments, **keywords):
            model = own(*arguments, **keywords)
            change(model)
            return model

        monkeypatch.setattr(plain, "load_model", load)

    return install


@pytest.mark.parametrize("arm", [plain, ours], ids=["plain", "ours"])
def test_honest_systems_get_rows(arm, reason):
    assert reason(arm) == ""


def test_documents_that_see_each_other(reason, change_batches):
    # With a mask of ones transformers looks at no positions: every document sees those before it, with positions as
    # they should be.
    change_batches(lambda batch: {**batch, "attention_mask": torch.ones_like(batch["input_ids"])})
    found = reason(plain)
    assert f"of {NUM_TENSORS} gradients differ from the plain arm's" in found
    assert "positions" not in found


def test_positions_that_do_not_restart(reason, monkeypatch):
    own = ours.make_batch

    def make_batch(documents):
        batch = own(documents)
        batch._items["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
        return batch

    monkeypatch.setattr(ours, "make_batch", make_batch)
    # Rotary positions are relative: where the documents stay apart, no gradient shows it.
    assert reason(ours) == "positions do not restart with every document of the pack"


def test_a_frozen_adapter(reason, monkeypatch):
    own = ours.load_start

    def load_start(model, tensors):
        own(model, tensors)
        next(
            parameter for name, parameter in model.named_parameters() if "layers.1.mlp.up_proj.lora_A" in name
        ).requires_grad_(False)

    monkeypatch.setattr(ours, "load_start", load_start)
    found = reason(ours)
    assert "1 tensors without a gradient ['1.mlp.up_proj.A']" in found
    assert f"it trains {NUM_TENSORS - 1} tensors of" in found


def test_an_adapter_that_the_optimizer_was_not_given(reason, monkeypatch):
    own = plain.make_optimizer
    monkeypatch.setattr(plain, "make_optimizer", lambda parameters, **options: own(list(parameters)[1:], **options))
    # It has its gradient in every step, so that the judge sees nothing.
    assert (
        reason(plain)
        == f"not training: the optimizer moved {NUM_TENSORS - 1} of {NUM_TENSORS} tensors, not ['0.self_attn.q_proj.A']"
    )


def test_a_loss_over_padding(reason, change_batches):
    change_batches(lambda batch: add_padding(batch, label=0))
    found = reason(plain)
    assert "gradients differ from the plain arm's" in found
    assert "labelled tokens are credited" in found


def test_padding_that_is_left_out_of_the_loss_and_not_credited_is_no_sabotage(reason, change_batches):
    change_batches(lambda batch: add_padding(batch, label=-100))
    assert reason(plain) == ""


def test_padding_credited_as_tokens(reason, files, monkeypatch):
    packs = [PaddedPack(pack) for pack in files.read_packs()]
    monkeypatch.setattr(files, "read_packs", lambda: packs)
    # Padding is masked and in no loss, so that gradients are right: only the count tells.
    assert (
        reason(plain)
        == f"{TINY.max_tokens + NUM_PADDING} tokens are credited, {TINY.max_tokens} real ones entered the model"
    )


def test_tokens_of_other_documents_are_not_those_of_the_pack(reason, change_batches):
    def exchange(batch):
        if exchange.calls:
            batch["input_ids"] = torch.where(batch["input_ids"] == 7, 8, batch["input_ids"])
        exchange.calls += 1
        return batch

    exchange.calls = 0
    change_batches(exchange)
    assert reason(plain).startswith("not training: step 0: the tokens that entered the model are not those of the pack")


@pytest.mark.parametrize(
    ("arm_is_reference", "expected"),
    [(False, "gradients differ from the plain arm's"), (True, "gradients of the plain arm are zero")],
)
def test_a_backward_of_zeros(arm_is_reference, expected, reason, change_model):
    change_model(lambda model: zero_losses(model, first=0))
    assert expected in reason(plain, is_judged=not arm_is_reference)


def test_a_backward_that_is_skipped_once_it_was_judged(reason, change_model):
    # What Adam remembers of the first step still moves every parameter.
    change_model(lambda model: zero_losses(model, first=1))
    assert (
        reason(plain)
        == "not training: 3 of 3 timed steps had gradients that are missing, zero or not finite: [0, 1, 2]"
    )


def test_an_optimizer_that_does_not_step(reason, idle_optimizer):
    assert reason(plain).startswith(f"not training: the optimizer moved 0 of {NUM_TENSORS} tensors")


def test_a_system_that_shows_no_batch(reason, monkeypatch):
    own = ours.CaseRecorder.batch_arrived
    monkeypatch.setattr(ours.CaseRecorder, "batch_arrived", lambda self, batch=None: own(self))
    assert reason(ours) == "the batch was not shown"


def add_padding(batch, *, label):
    """Return a flattened batch with padding behind it, as a document of its own."""
    tail = {
        "input_ids": torch.zeros(NUM_PADDING),
        "labels": torch.full((NUM_PADDING,), label),
        "position_ids": torch.arange(NUM_PADDING),
    }
    return {name: torch.cat([value, tail[name].to(value.dtype)[None]], dim=1) for name, value in batch.items()}


def zero_losses(model, *, first):
    """Multiply every loss from the first-th on by zero."""
    calls = []

    def zero(_, inputs, outputs):
        calls.append(1)
        if len(calls) > first:
            outputs.loss = outputs.loss * 0
        return outputs

    model.register_forward_hook(zero)


class PaddedPack(Pack):
    """A pack that claims its padding as tokens."""

    def __init__(self, pack):
        ids = np.concatenate([pack.input_id_T, np.zeros(NUM_PADDING, dtype=np.int64)])
        super().__init__(input_id_T=ids, lengths=[*pack.lengths, NUM_PADDING])

    def label_T(self, share):
        label_T = super().label_T(share)
        label_T[-NUM_PADDING:] = -100
        return label_T
