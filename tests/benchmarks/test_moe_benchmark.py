import json
import sys
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch

from benchmarks import moe, moe_layer
from benchmarks.ruler import driver, judge, report
from benchmarks.ruler.arms import padded
from benchmarks.ruler.building import build, busiest_share, num_busy
from benchmarks.ruler.cases import Case, CaseLog
from benchmarks.ruler.driver import parse_arm
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles, make_packs
from lightning_fastft.core.patcher import ModelPatcher
from tests.support.host_waits import count_host_waits

TINY = ("tiny-moe", "tiny-moe-skewed", "tiny-gpt-oss", "tiny-gpt-oss-skewed")
PYTHON = sys.executable


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    for name in TINY:
        build(WORKLOADS[name], root=folder, device="cpu", dtype=torch.float32)
    return folder


def files_of(root, name):
    return WorkloadFiles(root, WORKLOADS[name])


def load(files, *, dtype=torch.float32):
    model = moe._load_plain(files, device="cpu").to(dtype)
    judge.load_adapter(model, files.read_adapter())
    return model


def first_batch(files):
    from transformers import DataCollatorWithFlattening

    documents = files.read_packs()[0].documents(1.0)
    return DataCollatorWithFlattening()(
        [{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in documents]
    )


# Workloads


@pytest.mark.parametrize(
    ("name", "layers", "experts", "chosen"),
    [("qwen3-30b-a3b-lora", 48, 128, 8), ("gpt-oss-20b-lora", 24, 32, 4)],
    ids=["qwen3", "gpt-oss"],
)
def test_mixture_workloads_are_the_real_models(name, layers, experts, chosen):
    from transformers import AutoConfig

    whole, cut = WORKLOADS[name], WORKLOADS[name.replace("-lora", "-12l-lora")]
    config = AutoConfig.for_model(whole.model_type, **whole.model_config)
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (layers, experts, chosen)
    assert whole.num_experts == cut.num_experts == experts
    assert {**cut.model_config, "num_hidden_layers": layers} == whole.model_config
    for suffix, tokens in (("", 8192), ("-16k", 16_384), ("-skewed", 8192), ("-skewed-16k", 16_384)):
        workload = WORKLOADS[f"{cut.name}{suffix}"]
        assert (workload.max_tokens, workload.is_skewed) == (tokens, "skewed" in suffix)
        assert workload.weights_of in (None, workload.name.removesuffix("-16k"))


@pytest.mark.parametrize("name", TINY)
def test_routers_spread_rows_as_the_workload_says(root, name):
    files = files_of(root, name)
    told = json.loads(files.routing.read_text())
    chosen = record_choices(files, torch.float32)
    shares = [busiest_share(expert_TK, 32) for expert_TK in chosen]
    if files.workload.is_skewed:
        assert (told["lowest"], told["highest"]) == (0.5, 0.5)
        assert shares == [0.5, 0.5]
    else:
        assert told["highest"] < 0.35
        assert max(shares) < 0.35
    # The same token has other experts in the next layer.
    assert not torch.equal(*chosen)


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-gpt-oss"])
def test_rounding_does_not_change_which_experts_are_chosen(root, name):
    files = files_of(root, name)
    for wide, narrow in zip(record_choices(files, torch.float32), record_choices(files, torch.bfloat16)):
        assert torch.equal(wide, narrow)


def record_choices(files, dtype):
    model, chosen = load(files, dtype=dtype), []
    for layer in model.get_base_model().model.layers:
        router = layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router
        router.register_forward_hook(lambda module, _, outputs: chosen.append(outputs[2].sort(dim=-1).values))
    with torch.no_grad():
        model(input_ids=first_batch(files)["input_ids"])
    return chosen


def test_the_adapter_file_has_the_names_and_shapes_of_peft(root):
    from peft import get_peft_model_state_dict

    for name in ("tiny-moe", "tiny-gpt-oss"):
        files = files_of(root, name)
        adapter, own = files.read_adapter(), get_peft_model_state_dict(moe._load_plain(files, device="cpu"))
        assert {key: value.shape for key, value in adapter.items()} == {key: value.shape for key, value in own.items()}
        assert all(
            torch.equal(value, value.to(torch.bfloat16).float()) and value.abs().max() > 0 for value in adapter.values()
        )
        assert len({judge.canonical_name(key) for key in adapter}) == 2 * 2 * 6


# The judge


class Wrapped(torch.nn.Module):
    """What PEFT builds around experts, wrappers nested in a given order."""

    def __init__(self, order, shapes):
        super().__init__()
        inner = torch.nn.Linear(1, 1).requires_grad_(False)
        for parameter in order:
            wrapper = torch.nn.Module()
            wrapper.parameter_name = parameter
            wrapper.base_layer = inner
            for side in "AB":
                linear = torch.nn.Linear(1, 1, bias=False)
                linear.weight = torch.nn.Parameter(torch.randn(shapes[f"{parameter}.{side}"]))
                wrapper.add_module(f"lora_{side}", torch.nn.ModuleDict({"default": linear}))
            inner = wrapper
        attention = torch.nn.Module()
        for side, shape in (("A", (2, 6)), ("B", (6, 2))):
            linear = torch.nn.Linear(1, 1, bias=False)
            linear.weight = torch.nn.Parameter(torch.randn(shape))
            attention.add_module(f"lora_{side}", torch.nn.ModuleDict({"default": linear}))
        mlp = torch.nn.ModuleDict({"experts": inner})
        layer = torch.nn.ModuleDict({"mlp": mlp, "self_attn": torch.nn.ModuleDict({"q_proj": attention})})
        self.layers = torch.nn.ModuleList([layer])


# Three experts, rank 2: gate_up from 6 to 10 columns, down from 5 to 6.
STACKS = {"gate_up_proj.A": (6, 6), "gate_up_proj.B": (10, 6), "down_proj.A": (6, 5), "down_proj.B": (6, 6)}
FILE_NAMES = {
    "model.layers.0.mlp.experts.base_layer.lora_A.weight": (6, 6),
    "model.layers.0.mlp.experts.base_layer.lora_B.weight": (10, 6),
    "model.layers.0.mlp.experts.lora_A.weight": (6, 5),
    "model.layers.0.mlp.experts.lora_B.weight": (6, 6),
    "model.layers.0.self_attn.q_proj.lora_A.weight": (2, 6),
    "model.layers.0.self_attn.q_proj.lora_B.weight": (6, 2),
}


@pytest.mark.parametrize(
    "order", [("gate_up_proj", "down_proj"), ("down_proj", "gate_up_proj")], ids=["as PEFT", "the other way"]
)
def test_adapters_of_stacks_are_found_by_what_they_wrap(order):
    model = Wrapped(order, STACKS)
    tensors = {name: torch.randn(shape) for name, shape in FILE_NAMES.items()}
    judge.load_adapter(model, tensors)
    held = judge.trainable_adapters(model)
    for name, tensor in tensors.items():
        assert torch.equal(held[judge.canonical_name(name)], tensor)


def delta(a, b, *, rank):
    num_experts = a.shape[0] // rank
    return torch.einsum("ore,eri->eoi", b.reshape(b.shape[0], rank, num_experts), a.reshape(num_experts, rank, -1))


def test_exchanged_factors_are_those_of_the_transposed_stack():
    a, b = torch.randn(6, 5), torch.randn(7, 6)
    turned = judge.exchange_factors(a, b, rank=2)
    assert torch.allclose(delta(*turned, rank=2), delta(a, b, rank=2).transpose(1, 2))
    again = judge.exchange_factors(*turned, rank=2)
    assert torch.equal(again[0], a)
    assert torch.equal(again[1], b)


def test_a_system_that_reads_stacks_the_other_way_round_is_served_and_judged():
    # gate_up: A for 10 columns, B for 6; down: A for 6, B for 5.
    turned = {"gate_up_proj.A": (6, 10), "gate_up_proj.B": (6, 6), "down_proj.A": (6, 6), "down_proj.B": (5, 6)}
    model, tensors = (
        Wrapped(("gate_up_proj", "down_proj"), turned),
        {name: torch.randn(shape) for name, shape in FILE_NAMES.items()},
    )
    judge.load_adapter(model, tensors)
    held = judge.trainable_adapters(model)
    wanted = {judge.canonical_name(name): tensor for name, tensor in tensors.items()}
    for stack in ("gate_up_proj", "down_proj"):
        pair = [held[f"0.mlp.experts.{stack}.{side}"] for side in "AB"]
        own = [wanted[f"0.mlp.experts.{stack}.{side}"] for side in "AB"]
        assert torch.allclose(delta(*pair, rank=2), delta(*own, rank=2).transpose(1, 2))
    # Its gradients are compared after the same exchange.
    for parameter in held.values():
        parameter.grad = parameter.detach().clone()
    gradients = judge.read_gradients(model)
    assert judge.judge(gradients, wanted).passed
    gradients["0.mlp.experts.down_proj.A"] = gradients["0.mlp.experts.down_proj.A"].flip(0)
    assert not judge.judge(gradients, wanted).passed


def test_stacks_of_another_shape_are_refused_with_both_shapes():
    model = Wrapped(("gate_up_proj", "down_proj"), {**STACKS, "down_proj.A": (6, 9)})
    with pytest.raises(ValueError, match=r"0.mlp.experts.down_proj.A has the shape \(6, 9\) in the model and \(6, 5\)"):
        judge.load_adapter(model, {name: torch.randn(shape) for name, shape in FILE_NAMES.items()})
    reference = {"0.mlp.experts.down_proj.A": torch.randn(6, 5)}
    assert "has the shape (6, 9)" in judge.judge({"0.mlp.experts.down_proj.A": torch.randn(6, 9)}, reference).reason


# One layer


def layer_of(shape, arm, *, adapter="lora", load="balanced", num_tokens=48):
    model = moe_layer.make_model(shape, adapter=adapter, device="cpu", dtype=torch.float32)
    patcher = ModelPatcher()
    moe_layer.set_arm(model, arm, patcher)
    inputs, share = moe_layer.make_inputs(shape, num_tokens=num_tokens, load=load, device="cpu")
    return moe_layer.Layer(model, inputs), share


@pytest.mark.parametrize("shape", ["tiny-qwen3", "tiny-gpt-oss"])
@pytest.mark.parametrize("adapter", moe_layer.ADAPTERS)
def test_every_arm_computes_the_same_layer(shape, adapter):
    truth = layer_of(shape, "eager", adapter=adapter)[0].results()
    assert set(truth) >= {"output", "d states", "d routing weights"}
    assert len(truth) == (7 if adapter == "lora" else 3)
    assert all(float(tensor.abs().max()) > 0 for tensor in truth.values())
    for arm in moe_layer.ARMS[1:]:
        limits = judge.limits_of(arm)
        verdict = judge.judge(layer_of(shape, arm, adapter=adapter)[0].results(), truth, limits=limits)
        assert verdict.passed, (arm, verdict.reason)
        # Experts in e4m3 compute in it, and other numbers.
        assert (verdict.worst_cosine[1] > 0.99999) is (arm != "ours+fp8")


def test_host_waits_of_the_arms():
    found = {}
    for arm in moe_layer.ARMS:
        layer, _ = layer_of("tiny-qwen3", arm, adapter="none")
        # A gate is recognised on the first call.
        layer.backward(layer.forward())
        with count_host_waits() as forward:
            y_TD = layer.forward()
        with count_host_waits() as backward:
            layer.backward(y_TD)
        # On a CPU our grouped products are loops in plain PyTorch; on CUDA these lines do not run.
        found[arm] = tuple(
            sum("grouped_mm/reference.py" not in origin for origin in waits.origin) for waits in (forward, backward)
        )
    assert found["ours"] == found["ours+fp8"] == found["grouped_mm"] == (0, 0)
    # One bincount and one tolist, however many experts there are; on CUDA bincount itself waits more than once.
    assert found["published"] == (2, 0)
    # One or more for each expert.
    assert found["eager"][0] > 20


@pytest.mark.parametrize("num_experts", [10, 20, 128])
def test_skewed_routing_of_a_layer_gives_half_of_the_rows_to_a_tenth(num_experts):
    torch.manual_seed(0)
    logits_TE = torch.randn(2000, num_experts)
    top = moe_layer.skew_logits(logits_TE, num_chosen=4).topk(4, dim=-1).indices
    # One expert of ten cannot get more than every token once.
    assert busiest_share(top, num_experts) == pytest.approx(0.25 if num_experts == 10 else 0.5, abs=0.01)
    assert busiest_share(logits_TE.topk(4, dim=-1).indices, num_experts) < 0.25
    assert num_busy(num_experts) == num_experts // 10


def run_layers(tmp_path, *arguments):
    options = [
        "--out",
        str(tmp_path),
        "--shapes",
        "tiny-gpt-oss",
        "--tokens",
        "32",
        "--runs",
        "2",
        "--device",
        "cpu",
        "--adapters",
        "lora",
    ]
    assert moe_layer.main([*options, *arguments]) == 0
    return report.read_records(tmp_path / "raw.jsonl"), (tmp_path / "table.txt").read_text()


def test_layer_benchmark_measures_every_arm_once(tmp_path):
    records, table = run_layers(tmp_path, "--loads", "skewed")
    assert [(record["arm"], record["reason"]) for record in records] == [(arm, "") for arm in moe_layer.ARMS]
    assert "busiest tenth of the experts: 50% of the rows" in table
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + 6 * len(moe_layer.ARMS)
    # The next call finds them.
    assert run_layers(tmp_path, "--loads", "skewed")[0] == records


def drop_last(call):
    """The last expert's rows are lost."""
    return lambda self, x, index, weight: call(self, x, index, weight.masked_fill(index == self.num_experts - 1, 0.0))


def forget_weights(call):
    """Routing weights get no gradient."""
    return lambda self, x, index, weight: call(self, x, index, weight.detach())


def swap_tokens(call):
    """Outputs come back in another order."""
    return lambda self, x, index, weight: call(self, x, index, weight).roll(1, dims=0)


@pytest.mark.parametrize("spoil", [drop_last, forget_weights, swap_tokens])
def test_a_wrong_arm_gets_no_row(tmp_path, monkeypatch, spoil):
    monkeypatch.setattr(moe_layer, "published_experts_forward", spoil(moe_layer.published_experts_forward))
    records, table = run_layers(tmp_path, "--loads", "balanced", "--arms", "published", "grouped_mm")
    wrong, right = records
    assert wrong["reason"]
    assert "forward" not in wrong
    assert "no row: published" in table
    assert right["reason"] == ""
    assert ",published," not in (tmp_path / "rows.csv").read_text()


def test_an_arm_that_fails_stops_no_other(tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(moe_layer, "published_experts_forward", fail)
    records, table = run_layers(tmp_path, "--loads", "balanced", "--arms", "published", "ours")
    assert [bool(record["reason"]) for record in records] == [True, False]
    assert "no row: published: OutOfMemoryError: no room" in table


# Whole steps


def test_modes_are_read_and_others_refused():
    assert moe.parse_plain_mode("keep") == (True, None, False)
    assert moe.parse_plain_mode("recompute+published+flex") == (False, moe_layer.PUBLISHED, True)
    for mode in ("offload", "recompute+liger", "recompute+eager+published", "keep+flex+flex+x"):
        with pytest.raises(ValueError, match="mode of plain"):
            moe.parse_plain_mode(mode)
    assert moe.parse_unsloth_mode("unsloth") == ("unsloth", 0)
    assert moe.parse_unsloth_mode("off+padded32") == ("off", 32)
    for mode in ("keep", "off+padded", "off+padded0", "off+32", "off+paddedx"):
        with pytest.raises(ValueError, match="mode of unsloth"):
            moe.parse_unsloth_mode(mode)
    (reference,) = parse_arm("plain:reference+flex", template=Case("tiny-moe", "", ""))
    assert (reference.mode, reference.num_steps) == ("recompute+flex", 0)


def test_padded_batches_hold_every_document_once_and_are_spread_over_lengths():
    packs = make_packs(WORKLOADS["gpt-oss-20b-12l-lora"])
    groups = padded.padded_batches(packs, batch_size=16, num_warmup=6, num_steps=10_000)
    assert groups[0] is packs[0]
    timed = groups[6:]
    lengths = sorted(length for pack in packs for length in pack.lengths)
    assert sorted(length for group in timed for length in group.lengths) == lengths
    assert sum(group.input_id_T.size for group in timed) == 48 * 8192
    assert all(len(group.lengths) == 16 for group in timed if min(group.lengths) > min(lengths))
    assert padded.real_share(timed) > 0.9
    assert padded.real_share(packs) < 0.5
    # Ten of the batches have nearly the mean length of all.
    mean = np.mean([group.input_id_T.size for group in timed])
    assert abs(np.mean([group.input_id_T.size for group in timed[:10]]) / mean - 1) < 0.1
    # The longest is met while warming up.
    assert max(groups[1].lengths) == max(lengths)
    assert len(padded.padded_batches(packs, batch_size=16, num_warmup=6, num_steps=10)) == 16


def pad(rows):
    """What a trainer's collator makes of documents."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(name, value):
        return torch.tensor([[*row[name], *[value] * (longest - len(row[name]))] for row in rows])

    mask = torch.tensor([[int(column < len(row["input_ids"])) for column in range(longest)] for row in rows])
    return {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100), "attention_mask": mask}


def test_check_padded_refuses_what_is_not_the_documents():
    documents = make_packs(WORKLOADS["tiny-moe"])[0].documents(1.0)
    batch = pad([{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in documents])
    padded.check_padded(batch, documents)
    row = min(range(len(documents)), key=lambda number: len(documents[number][0]))
    for name in ("input_ids", "labels", "attention_mask"):
        wrong = {**batch, name: batch[name].clone()}
        wrong[name][row, 1 if name != "attention_mask" else -1] += 1
        with pytest.raises(ValueError, match=f"Row {row}"):
            padded.check_padded(wrong, documents)
    with pytest.raises(ValueError, match="documents"):
        padded.check_padded({name: value[:-1] for name, value in batch.items()}, documents)


def test_check_padded_derives_the_mask_of_a_collator_that_makes_none():
    documents = make_packs(WORKLOADS["tiny-moe"])[0].documents(1.0)
    batch = pad([{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in documents])
    del batch["attention_mask"]
    padded.check_padded(batch, documents)
    row = min(range(len(documents)), key=lambda number: len(documents[number][0]))
    length = len(documents[row][0])
    # A token that changed, a label that was lost, and a label in the padding.
    for name, column, value in (("input_ids", length - 1, -1), ("labels", length - 1, -100), ("labels", length, 3)):
        wrong = {**batch, name: batch[name].clone()}
        wrong[name][row, column] = value
        with pytest.raises(ValueError, match=f"Row {row}"):
            padded.check_padded(wrong, documents)
    with pytest.raises(ValueError, match="documents of up to"):
        padded.check_padded({name: value[:, :-1] for name, value in batch.items()}, documents)


def test_check_padded_takes_documents_that_a_collator_concatenates():
    documents = make_packs(WORKLOADS["tiny-moe"])[0].documents(1.0)
    batch = {
        "input_ids": torch.tensor(np.concatenate([ids for ids, _ in documents]))[None],
        "labels": torch.tensor(np.concatenate([labels for _, labels in documents]))[None],
        "position_ids": torch.tensor(np.concatenate([np.arange(len(ids)) for ids, _ in documents]))[None],
    }
    assert not padded.check_padded(batch, documents)
    for name, words in (("input_ids", "one after the other"), ("labels", "labels"), ("position_ids", "anew")):
        wrong = {**batch, name: batch[name].clone()}
        wrong[name][0, 1] = -7
        with pytest.raises(ValueError, match=words):
            padded.check_padded(wrong, documents)


class Trainer:
    """As much of a transformers Trainer as the padded arm touches."""

    def __init__(self, model, *, collator=pad):
        self.model, self.data_collator, self.callbacks = model, collator, []

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def training_step(self, model, inputs):
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()

    def train(self):
        control = SimpleNamespace(should_training_stop=False)
        for row in self.train_dataset:
            self.training_step(self.model, self.data_collator([row]))
            torch.optim.SGD(
                [parameter for parameter in self.model.parameters() if parameter.requires_grad], lr=0.1
            ).step()
            self.model.zero_grad(set_to_none=True)
            for callback in self.callbacks:
                callback.on_step_end(None, None, control)
            if control.should_training_stop:
                return


@pytest.fixture
def reference(root, tmp_path):
    """Leave the plain arm's gradients of gpt-oss, packed."""
    files = files_of(root, "tiny-gpt-oss")
    cases = parse_arm("plain:reference", template=Case("tiny-gpt-oss", "", ""))
    moe.run_plain(cases, files=files, log=CaseLog(tmp_path / "reference.jsonl"), device="cpu")
    return files


def run_padded(files, tmp_path, trainer):
    (case,) = parse_arm("unsloth:unsloth+padded4", template=Case("tiny-gpt-oss", "", "", num_warmup=3, num_steps=5))
    moe.run_padded_cases(
        [case], trainer=trainer, files=files, log=CaseLog(tmp_path / "raw.jsonl"), is_cuda=False, batch_size=4
    )
    return report.read_records(tmp_path / "raw.jsonl")


def test_padded_batches_have_the_gradients_of_the_packed_step(reference, tmp_path):
    (record,) = run_padded(reference, tmp_path, Trainer(load(reference)))
    assert record["reason"] == ""
    assert record["verdict"]["worst_cosine"][1] > 0.99999
    assert record["summary"]["n"] == 5
    timed = padded.padded_batches(reference.read_packs(), batch_size=4, num_warmup=3, num_steps=5)[3:]
    # Real tokens of all timed steps over the time of all timed steps.
    assert record["tokens_per_s"] == pytest.approx(
        sum(group.input_id_T.size for group in timed) / sum(record["ms"]) * 1e3
    )
    assert record["real_share"] == pytest.approx(padded.real_share(timed))


def test_padded_batches_of_other_tokens_or_without_a_mask_are_refused(reference, tmp_path):
    def shifted(rows):
        return pad([{**row, "input_ids": row["input_ids"][::-1]} for row in rows])

    def one_document_less(rows):
        return pad(rows)

    (record,) = run_padded(reference, tmp_path, Trainer(load(reference), collator=shifted))
    assert "is not document 0" in record["reason"]
    trainer = Trainer(load(reference), collator=one_document_less)
    trainer.training_step = lambda model, inputs: Trainer.training_step(
        trainer, model, {name: value[1:] for name, value in inputs.items()}
    )
    record = run_padded(reference, tmp_path, trainer)[-1]
    assert "differ from the plain arm's" in record["reason"]


def test_packed_documents_of_gpt_oss_do_not_see_each_other_in_the_plain_arm(root):
    files = files_of(root, "tiny-gpt-oss")
    model = load(files)
    batch, documents = first_batch(files), files.read_packs()[0].documents(1.0)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.from_numpy(ids)[None]).logits[0] for ids, _ in documents])
        assert (model(**batch).logits[0] - alone).abs().max() > 0.1
        model.get_base_model().model.register_forward_pre_hook(moe.isolate_documents, with_kwargs=True)
        assert torch.allclose(model(**batch).logits[0], alone, atol=1e-4)


def record_of(system, mode, rate, gib, *, workload="qwen3-30b-a3b-12l-lora", **more):
    found = {
        "workload": workload,
        "system": system,
        "mode": mode,
        "title": f"{system} {mode}",
        "label_share": 1.0,
        "optimizer": "adamw_8bit",
    }
    return {**found, "reason": "", "tokens_per_s": rate, "peak_gib": {"allocated": gib}, "num_steps": 30, **more}


def test_a_case_is_done_when_another_try_would_say_the_same(root, tmp_path):
    files = files_of(root, "tiny-moe")
    (case,) = parse_arm("ours:keep", template=Case("tiny-moe", "", ""))
    record = record_of("ours", "keep", 1.0, 1.0, workload="tiny-moe")
    assert moe.is_done(case, [record], files=files)
    assert moe.is_done(case, [{**record, "reason": "RuntimeError: out of memory"}], files=files)
    assert not moe.is_done(case, [{**record, "reason": "not started: 3 s of the budget left"}], files=files)
    assert not moe.is_done(case, [{**record, "mode": "recompute"}, {**record, "num_steps": 0}], files=files)
    (reference,) = parse_arm("plain:reference", template=Case("tiny-moe", "", ""))
    assert not moe.is_done(reference, [], files=files_of(tmp_path, "tiny-moe"))


def test_what_a_system_trains_is_told_in_its_own_names(root):
    told = moe.trained_in_layer(load(files_of(root, "tiny-moe")), 0)
    assert len(told) == 12
    assert told["base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.default.weight"] == [128, 64]


@pytest.fixture
def run_moe(root, tmp_path, capsys, monkeypatch):
    """Run the whole benchmark on a CPU, with its driver in this process; return what it prints."""
    monkeypatch.setattr(moe.signal, "signal", lambda *_: None)
    options = ["--root", str(root), "--out", str(tmp_path), "--device", "cpu", "--steps", "2", "--warmup", "2"]

    def run(name, *arms):
        assert moe.main(["run", "--workload", name, *options, "--arms", *arms]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.fault
@pytest.mark.parametrize(
    ("name", "is_apart"), [pytest.param("tiny-moe-skewed", True, marks=pytest.mark.fault), ("tiny-gpt-oss", False)]
)
def test_whole_steps_of_plain_and_ours_have_the_same_gradients_and_get_rows(
    run_moe, tmp_path, monkeypatch, name, is_apart
):
    if not is_apart:
        # That an arm is a process of its own is shown by the other workload.
        monkeypatch.setattr(driver, "_run_process", run_arm_here)
    arms = ["plain:reference,recompute,keep+eager,keep+published", "ours:recompute,keep"]
    first = run_moe(name, *arms)
    records = [record for record in report.read_records(tmp_path / "raw.jsonl") if record["num_steps"]]
    assert [(record["title"], record["reason"]) for record in records] == [
        (title, "")
        for title in ("plain recompute", "plain keep+eager", "plain keep+published", "ours recompute", "ours keep")
    ]
    assert all(record["verdict"]["worst_cosine"][1] > 0.99999 for record in records)
    assert [status["state"] for status in records[-1]["router"]] == ["active"]
    assert ("gets 50.0% of the rows" in first) == ("skewed" in name)
    rows = (tmp_path / "rows.csv").read_text().splitlines()
    # Seven figures of every ruler row, then mean, host syncs of the whole step, device memory and the whole run.
    assert len(rows) == 1 + 5 * 11
    assert "busiest tenth" in rows[1]
    # A run of peers alone, none of which looks at the routing, has rows too.
    unrouted = [{name: value for name, value in record.items() if name != "routing"} for record in records]
    assert {row["workload"] for row in moe.moe_rows(unrouted, command="x")} == {f"{name}, packed, labels 100%"}
    # Nothing is left for the next run, whose table is the same.
    again = run_moe(name, *arms)
    assert "arm:" not in again
    assert again.strip() in first


@pytest.mark.fault
def test_a_mixture_of_hybrid_layers_has_the_gradients_of_padded_documents(tmp_path):
    """Packed, plain layers would carry states over; the reference pads documents instead."""
    workload = WORKLOADS["tiny-qwen3.5-moe"]
    build(workload, root=tmp_path, device="cpu", dtype=torch.float32)
    files, log = WorkloadFiles(tmp_path, workload), CaseLog(tmp_path / "raw.jsonl")
    template = Case(workload.name, "", "", num_warmup=2, num_steps=2)
    for run, text in (
        (moe.run_plain, "plain:recompute+padded,recompute+eager"),
        (moe.run_ours, "ours:keep+fused/adamw_fused"),
    ):
        run(parse_arm(text, template=template), files=files, log=log, device="cpu")
    padded_plain, packed_plain, ours = report.read_records(tmp_path / "raw.jsonl")
    assert (padded_plain["reason"], ours["reason"]) == ("", "")
    assert ours["verdict"]["worst_cosine"][1] > 0.99999
    assert "cosine" in packed_plain["reason"]


def test_adapters_of_shared_experts_are_taken_off():
    block = torch.nn.ModuleDict({"shared_expert": torch.nn.ModuleDict({"down_proj": torch.nn.Linear(3, 2)})})
    experts = torch.nn.ModuleDict({"down_proj": torch.nn.Linear(3, 2)})
    model = torch.nn.ModuleDict({"mlp": block, "experts": experts})
    own = block["shared_expert"]["down_proj"]
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["down_proj"]), model)
    assert moe.drop_shared_adapters(model) == ["mlp.shared_expert.down_proj"]
    assert block["shared_expert"]["down_proj"] is own
    assert [name.split(".")[0] for name, _ in model.named_parameters() if "lora_A" in name] == ["experts"]


def run_arm_here(cases, *, root, raw, device, module, **_):
    given = ["--root", str(root), "--device", device, "--raw", str(raw)]
    assert (module, moe.main(["arm", "--cases", json.dumps([asdict(case) for case in cases]), *given])) == (
        "benchmarks.moe",
        0,
    )
    return ""


@pytest.mark.fault
def test_experts_in_nf4_are_the_same_for_plain_and_ours(root, tmp_path):
    """Both quantise what they read; the reference is made with transformers' experts on the same four bits."""
    files = files_of(root, "tiny-moe-qlora")
    build(WORKLOADS["tiny-moe-qlora"], root=root, device="cpu", dtype=torch.float32)
    log, template = CaseLog(tmp_path / "raw.jsonl"), Case("tiny-moe-qlora", "", "", num_warmup=2, num_steps=2)
    moe.run_plain(parse_arm("plain:reference,recompute", template=template), files=files, log=log, device="cpu")
    moe.run_ours(parse_arm("ours:recompute", template=template), files=files, log=log, device="cpu")
    records = [record for record in report.read_records(tmp_path / "raw.jsonl") if record["num_steps"]]
    assert [record["reason"] for record in records] == ["", ""]
    assert all(record["verdict"]["worst_cosine"][1] > 0.99999 for record in records)


@pytest.mark.fault
@pytest.mark.parametrize("name", ["tiny-moe", "tiny-gpt-oss"])
@pytest.mark.parametrize("spoil", [drop_last, forget_weights])
def test_ours_with_a_fault_in_its_experts_gets_no_row(root, tmp_path, monkeypatch, spoil, name):
    from lightning_fastft.moe import interface as experts

    files = files_of(root, name)
    template = Case(name, "", "", num_warmup=2, num_steps=2)
    moe.run_plain(
        parse_arm("plain:reference", template=template), files=files, log=CaseLog(tmp_path / "raw.jsonl"), device="cpu"
    )
    monkeypatch.setattr(experts, "fastft_experts_forward", spoil(experts.fastft_experts_forward))
    moe.run_ours(
        parse_arm("ours:keep", template=template), files=files, log=CaseLog(tmp_path / "raw.jsonl"), device="cpu"
    )
    record = report.read_records(tmp_path / "raw.jsonl")[-1]
    assert record["reason"]
    assert "summary" not in record
