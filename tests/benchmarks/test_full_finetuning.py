"""Full fine-tuning in the ruler: the same weights in every system, each trained once, and systems that train less
get no row.
"""

import importlib
import sys
import time
import types
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import step_profile
from benchmarks.ruler import judge, proof, report, tensors, workloads
from benchmarks.ruler.arms import ours, plain, sft
from benchmarks.ruler.building import build
from benchmarks.ruler.cases import FULL_LEARNING_RATE, LEARNING_RATE, Case, CaseLog, learning_rate_of
from benchmarks.ruler.driver import parse_arm
from benchmarks.ruler.model_configs import num_weights
from benchmarks.ruler.workloads import WORKLOADS, WorkloadFiles, lora_config
from lightning_fastft.training.fine_tuner import FineTuner

FULL = WORKLOADS["tiny-full"]
TIED = replace(FULL, name="tied-full", model_config={**FULL.model_config, "tie_word_embeddings": True}, weights_of=None)
# Two layers of 7 matrices and 4 norms, the last norm, both ends.
NUM_TENSORS = 25
NUM_NORM_VALUES = 2 * (2 * 64 + 2 * 16) + 64


def num_values(workload):
    return num_weights(workload.model_config) + NUM_NORM_VALUES


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with both workloads and the reference gradients of the honest plain arm."""
    root = tmp_path_factory.mktemp("full")
    for workload in (FULL, TIED):
        build(workload, root=root, device="cpu", dtype=torch.float32)
        case = Case(workload.name, "plain", "recompute", num_warmup=1, num_steps=0)
        plain.run([case], files=WorkloadFiles(root, workload), log=CaseLog(root / "raw.jsonl"), device="cpu")
    return root


@pytest.fixture
def files(root):
    return WorkloadFiles(root, FULL)


@pytest.fixture
def records(root, tmp_path):
    """Return a function that runs cases of an arm and returns their records."""

    def run(text, *, workload=FULL, **options):
        template = Case(workload.name, "", "", num_warmup=2, num_steps=3, is_judged=True)
        cases = [replace(case, **options) for case in parse_arm(text, template=template)]
        arm, log = {"plain": plain, "ours": ours}[cases[0].system], tmp_path / "raw.jsonl"
        log.unlink(missing_ok=True)
        arm.run(cases, files=WorkloadFiles(root, workload), log=CaseLog(log), device="cpu")
        found = report.read_records(log)
        assert all(bool(report.result_rows([record], command="x")) == (not record["reason"]) for record in found)
        return found

    return run


@pytest.fixture
def reason(records):
    """Return a function that runs one case of the plain arm and returns why it got no row."""
    return lambda text="plain:recompute", **options: records(text, **options)[0]["reason"]


@pytest.fixture
def change_model(monkeypatch):
    """Return a function that changes the model of the plain arm once it has its weights."""

    def install(change):
        own = plain.load_start

        def load(model, values):
            own(model, values)
            change(model)

        monkeypatch.setattr(plain, "load_start", load)

    return install


# Workloads


def test_workloads_that_are_built_stay_what_they_are():
    assert "is_full" not in workloads.fingerprint(WORKLOADS["qwen3-8b-lora"])
    assert workloads.fingerprint(WORKLOADS["qwen3-8b-full"])["is_full"] is True


def test_full_workloads_share_the_weights_of_the_adapters_and_nothing_else(root, files):
    base = WorkloadFiles(root, WORKLOADS["tiny"])
    assert base.is_built()
    assert files.is_built()
    assert files.model == base.model
    assert files.reference(1.0) != base.reference(1.0)
    assert not (files.folder / "model").exists()
    assert set(files.read_trained()) == set(load_file(files.model / "model.safetensors"))
    assert set(base.read_trained()) == set(base.read_adapter())


@pytest.mark.parametrize("name", ["qwen3-8b-full", "qwen3-0.6b-full"])
def test_large_full_workloads_read_the_folder_of_their_lora_workload(name, tmp_path):
    workload = WORKLOADS[name]
    assert (
        WorkloadFiles(tmp_path, workload).model
        == WorkloadFiles(tmp_path, WORKLOADS[name.replace("-full", "-lora")]).model
    )
    assert lora_config(workload) is None


def test_every_arm_has_the_learning_rate_of_its_workload(files):
    assert learning_rate_of(FULL) == FULL_LEARNING_RATE == 1e-5
    assert learning_rate_of(WORKLOADS["tiny"]) == LEARNING_RATE == 2e-4
    assert ours.make_tuner(files, optimizer="adamw_8bit", is_cuda=False).learning_rate == FULL_LEARNING_RATE
    case = Case(FULL.name, "trl", "recompute")
    assert sft.training_arguments(case, files=files, is_cuda=False)["learning_rate"] == FULL_LEARNING_RATE


def test_the_plain_loop_trains_at_the_rate_of_its_workload(reason, monkeypatch):
    own, rates = plain.make_optimizer, []

    def make_optimizer(parameters, **options):
        optimizer = own(parameters, **options)
        rates.extend(group["lr"] for group in optimizer.param_groups)
        return optimizer

    monkeypatch.setattr(plain, "make_optimizer", make_optimizer)
    assert reason() == ""
    assert rates == [FULL_LEARNING_RATE]


# Tensors in files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_tensors_are_what_the_library_reads(dtype, tmp_path):
    wanted = {
        "a": torch.randn(3, 5).to(dtype),
        "turned": torch.randn(4, 6).to(dtype).T,
        "scalar": torch.tensor(2.5, dtype=dtype),
    }
    tensors.write_tensors(wanted, tmp_path / "x.safetensors")
    found, lazy = load_file(tmp_path / "x.safetensors"), tensors.TensorFiles([tmp_path / "x.safetensors"])
    assert list(tmp_path.iterdir()) == [tmp_path / "x.safetensors"]
    assert set(found) == set(lazy) == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor)
        assert torch.equal(lazy[name], tensor)
        assert lazy[name].dtype == dtype


def test_tensor_files_read_every_shard(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "2.safetensors")
    found = tensors.TensorFiles(sorted(tmp_path.iterdir()))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"a": [0, 0], "b": [1, 1, 1]}


@pytest.mark.parametrize("piece", [7, 100, 10_000])
def test_gradients_compared_in_pieces_give_what_they_give_at_once(piece, monkeypatch):
    monkeypatch.setattr(tensors, "PIECE", piece)
    left, right = torch.randn(13, 77), torch.randn(13, 77).to(torch.bfloat16)
    cosine, error = judge._compare(left, right, device="cpu")
    whole = torch.nn.functional.cosine_similarity(left.double().flatten(), right.double().flatten(), dim=0)
    assert cosine == pytest.approx(float(whole), abs=1e-12)
    assert error == pytest.approx(abs(float(left.double().norm() / right.double().norm()) - 1), abs=1e-12)


# Names and values


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.11.mlp.up_proj.weight", "11.mlp.up_proj.weight"),
        ("_orig_mod.model.layers.11.input_layernorm.weight", "11.input_layernorm.weight"),
        ("module.model._orig_mod.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.norm.weight", "norm.weight"),
    ],
)
def test_weight_name_does_not_depend_on_the_wrapper(name, expected):
    assert judge.weight_name(name) == expected


@pytest.mark.parametrize(
    ("workload", "num_tensors"), [(FULL, NUM_TENSORS), (TIED, NUM_TENSORS - 1)], ids=["untied", "tied"]
)
def test_every_weight_is_trained_once(workload, num_tensors, root):
    trained = judge.trainable_tensors(plain.load_model(WorkloadFiles(root, workload), device="cpu"))
    assert len(trained) == num_tensors
    assert sum(parameter.numel() for parameter in trained.values()) == num_values(workload)
    assert ("lm_head.weight" in trained) == (workload is FULL)


def test_weights_beside_adapters_are_refused(root):
    model = plain.load_model(WorkloadFiles(root, WORKLOADS["tiny"]), device="cpu")
    assert all(key.endswith((".A", ".B")) for key in judge.trainable_tensors(model))
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"norm\.weight is trained and is no adapter"):
        judge.trainable_tensors(model)


def test_adapters_are_asked_for_where_weights_are_trained(files):
    with pytest.raises(ValueError, match="is trained and is no adapter"):
        judge.trainable_adapters(plain.load_model(files, device="cpu"))


def test_load_weights_gives_the_values_of_the_file_back_in_place(files):
    model, values = plain.load_model(files, device="cpu"), files.read_trained()
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    judge.load_weights(model, values)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())


def test_load_weights_refuses_another_set_of_tensors(files):
    model, values = plain.load_model(files, device="cpu"), dict(files.read_trained())
    with pytest.raises(ValueError, match=r"has the shape \(64,\) in the model and \(63,\)"):
        judge.load_weights(model, {**values, "model.norm.weight": torch.ones(63)})
    model.lm_head.weight.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"trains 24 tensors, the model's file has 25; they differ in \['lm_head.weight'\]"
    ):
        judge.load_weights(model, values)


# Arms


@pytest.mark.parametrize("text", ["plain:recompute,keep", "ours:keep,recompute,keep+fused"])
def test_honest_systems_train_all_weights_and_get_rows(text, records):
    found = records(text)
    assert [record["reason"] for record in found] == [""] * len(found)
    assert {record["num_trained"] for record in found} == {num_values(FULL)}
    assert {record["num_movable"] for record in found} == {NUM_TENSORS}
    assert all(record["verdict"]["num_tensors"] == NUM_TENSORS for record in found)
    assert all(record["verdict"]["worst_cosine"][1] > 0.999999 for record in found)
    # Every case starts from the weights of the file, not from those that the case before it has trained.
    losses = [record["first_loss"] for record in found]
    assert max(losses) - min(losses) < 1e-5
    fused = [record for record in found if "fused" in record["mode"]]
    assert all(record["fused"][0]["state"] == "active" for record in fused)


@pytest.mark.parametrize("text", ["plain:recompute", "ours:keep+fused"])
def test_a_tied_weight_is_counted_once(text, records):
    (record,) = records(text, workload=TIED)
    assert record["reason"] == ""
    assert record["num_trained"] == num_values(TIED)
    assert record["verdict"]["num_tensors"] == NUM_TENSORS - 1


def test_gradients_are_judged_where_they_lie_and_kept_in_their_dtype(files):
    model = plain.load_model(files, device="cpu").to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    found = judge.view_gradients(model)
    assert all(
        found[name].data_ptr() == parameter.grad.data_ptr()
        for name, parameter in judge.trainable_tensors(model).items()
    )
    judge.save_gradients(found, files.folder / "kept.safetensors")
    kept = judge.load_gradients(files.folder / "kept.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.bfloat16}
    assert judge.judge(found, kept).passed


# Systems that train less


def test_a_frozen_part_is_refused(reason, change_model):
    change_model(lambda model: model.model.layers[1].mlp.requires_grad_(False))
    found = reason()
    assert (
        "3 tensors without a gradient ['1.mlp.down_proj.weight', '1.mlp.gate_proj.weight', '1.mlp.up_proj.weight']"
        in found
    )
    assert f"it trains {NUM_TENSORS - 3} tensors of" in found


def test_a_head_that_was_untied_is_refused(reason, change_model):
    def untie(model):
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())

    change_model(untie)
    assert "1 that the plain arm does not train ['lm_head.weight']" in reason(workload=TIED)


def test_weights_in_another_dtype_are_refused(reason, change_model):
    change_model(lambda model: model.double())
    assert "it trains weights in ['torch.float64'], and not all of them in torch.float32" in reason()


def test_adapters_instead_of_weights_are_refused(records, monkeypatch):
    monkeypatch.setattr(ours, "lora_config", lambda workload: lora_config(WORKLOADS["tiny"]))
    (record,) = records("ours:keep")
    assert "The model trains 28 tensors, the model's file has 25" in record["reason"]


def test_an_optimizer_that_does_nothing_is_refused(reason, idle_optimizer):
    assert reason().startswith(f"not training: the optimizer moved 0 of {NUM_TENSORS} tensors")


def test_a_weight_that_the_optimizer_was_not_given_is_refused(reason, monkeypatch):
    own = plain.make_optimizer
    monkeypatch.setattr(plain, "make_optimizer", lambda parameters, **options: own(list(parameters)[:-1], **options))
    assert (
        reason()
        == f"not training: the optimizer moved {NUM_TENSORS - 1} of {NUM_TENSORS} tensors, not ['lm_head.weight']"
    )


@pytest.mark.parametrize("first", [0, 1], ids=["at once", "after the judged step"])
def test_a_layer_with_zero_gradients_is_refused(first, reason, change_model):
    def spoil(model):
        calls = []

        def zero(gradient):
            calls.append(1)
            return gradient * 0 if len(calls) > first else gradient

        # Not the layer that is looked at in every step.
        model.model.layers[1].mlp.up_proj.weight.register_hook(zero)

    change_model(spoil)
    found = reason()
    if first == 0:
        assert f"1 of {NUM_TENSORS} gradients differ from the plain arm's" in found
    else:
        assert found == "not training: 1 of 3 timed steps had gradients that are missing, zero or not finite: [2]"


# What bf16 can show


class _Block(torch.nn.Module):
    """A matrix and a norm at 1, in bf16."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.up_proj = torch.nn.Linear(64, 64, bias=False)
        self.norm = torch.nn.RMSNorm(64)
        self.up_proj.weight.data.normal_(std=0.0156, generator=generator)
        self.to(torch.bfloat16)


def _proof_of(model, *, change, learning_rate=FULL_LEARNING_RATE):
    found = proof.TrainingProof(share=1.0, learning_rate=learning_rate, dtype=torch.bfloat16)
    assert found.see_model(model, None) == ""
    found.begin()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    change(model)
    return found, found.problem([])


def test_norms_in_bf16_need_not_move_and_matrices_must():
    def step(model):
        before = model.norm.weight.clone()
        torch.optim.AdamW(model.parameters(), lr=FULL_LEARNING_RATE).step()
        # An honest step is lost in the last digit of 1.
        assert torch.equal(model.norm.weight, before)

    found, problem = _proof_of(_Block(), change=step)
    assert problem == ""
    assert found.num_movable == 1
    _, problem = _proof_of(_Block(), change=lambda model: None)
    assert problem == "the optimizer moved 0 of 1 tensors, not ['up_proj.weight']"


def test_a_rate_that_moves_nothing_proves_nothing():
    _, problem = _proof_of(_Block(), change=lambda model: None, learning_rate=1e-30)
    assert problem == "the learning rate is below the last digit of every weight"


@pytest.mark.parametrize(
    ("name", "asked", "dtype", "is_allowed"),
    [
        ("norm", torch.bfloat16, torch.float32, True),
        ("norm", torch.bfloat16, torch.float16, False),
        ("norm", torch.float32, torch.bfloat16, False),
        ("up_proj", torch.bfloat16, torch.float32, False),
        ("up_proj", torch.float32, torch.bfloat16, False),
    ],
)
def test_norms_may_be_trained_in_fp32_and_nothing_else_in_another_dtype(name, asked, dtype, is_allowed):
    found = proof.TrainingProof(share=1.0, learning_rate=FULL_LEARNING_RATE, dtype=asked)
    model = _Block().to(asked)
    getattr(model, name).to(dtype)
    problem = (
        f"it trains weights in {sorted(map(str, (asked, dtype)))}, and not all of them in {asked}: 1 tensors, "
        f"['{name}.weight']"
    )
    assert found.see_model(model, None) == ("" if is_allowed else problem)
    matrix, vector = ((dtype if name == part else asked) for part in ("up_proj", "norm"))
    assert found.dtypes == {
        "matrices": {str(matrix).removeprefix("torch."): 1},
        "vectors": {str(vector).removeprefix("torch."): 1},
    }


def test_norms_in_fp32_beside_bf16_must_move():
    model = _Block()
    model.norm.float()
    found, problem = _proof_of(
        model, change=lambda model: torch.optim.AdamW(model.parameters(), lr=FULL_LEARNING_RATE).step()
    )
    assert (found.num_movable, problem) == (2, "")
    _, problem = _proof_of(
        model, change=lambda model: torch.optim.AdamW([model.up_proj.weight], lr=FULL_LEARNING_RATE).step()
    )
    assert problem == "the optimizer moved 1 of 2 tensors, not ['norm.weight']"


@pytest.mark.parametrize(
    ("vectors", "note"),
    [
        ({"float32": 9}, "  note: plain recompute, labels 100%, adamw_8bit: 9 norm weights in float32"),
        ({"bfloat16": 9}, None),
    ],
)
def test_the_table_says_which_norms_are_wider(vectors, note, records):
    (record,) = records("plain:recompute")
    record["dtypes"] = {"matrices": {"bfloat16": 16}, "vectors": vectors}
    assert [line for line in report.render_table([record]).splitlines() if "note:" in line] == ([note] if note else [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("piece", [8, 1000])
def test_a_fingerprint_shows_one_bit_and_any_exchange(dtype, piece, monkeypatch):
    monkeypatch.setattr(tensors, "PIECE", piece)
    tensor = torch.randn(5, 7).to(dtype)
    before = int(proof.fingerprint(tensor))
    assert int(proof.fingerprint(tensor.clone())) == before
    for place in range(tensor.numel()):
        other = tensor.clone()
        integers = other.view(torch.int16 if dtype is torch.bfloat16 else torch.int32).view(-1)
        integers[place] ^= 1
        assert int(proof.fingerprint(other)) != before
    assert int(proof.fingerprint(tensor.roll(1))) != before
    assert int(proof.fingerprint(tensor.flip(0))) != before


def test_a_proof_holds_no_copy_of_what_is_trained():
    found, _ = _proof_of(_Block(), change=lambda model: None)
    assert all(isinstance(value, int) for value in found._before.values())


def test_what_a_trainer_trains_is_printed():
    model = _Block()
    model.norm.requires_grad_(False)
    text = sft.describe_model(model)
    assert (
        text
        == "trains 4096 values in 1 tensors of torch.bfloat16; frozen: 1 tensors ['norm.weight']; checkpointing in 0 "
        "modules"
    )


class _Peers:
    """Stand in for Unsloth and TRL: note what their functions are called with."""

    def __init__(self):
        self.calls = {}

    def from_pretrained(self, name, **options):
        self.calls["load"] = options
        return torch.nn.Linear(2, 2), "tokenizer"

    def get_peft_model(self, model, **options):
        self.calls["adapters"] = options
        return model

    def config(self, **options):
        self.calls["config"] = options

    def trainer(self, **options):
        self.calls["trainer"] = options
        return types.SimpleNamespace(model=options["model"])


@pytest.fixture
def peers(monkeypatch):
    found = _Peers()
    monkeypatch.setitem(sys.modules, "unsloth", types.SimpleNamespace(FastLanguageModel=found))
    monkeypatch.setitem(sys.modules, "trl", types.SimpleNamespace(SFTConfig=found.config, SFTTrainer=found.trainer))
    monkeypatch.setattr(sft, "seed_documents", lambda: None)
    monkeypatch.setattr(sft, "run_cases", lambda cases, **options: None)
    monkeypatch.delitem(sys.modules, "benchmarks.ruler.arms.unsloth", raising=False)
    yield found
    sys.modules.pop("benchmarks.ruler.arms.unsloth", None)


def _run_unsloth(mode, workload, root):
    arm = importlib.import_module("benchmarks.ruler.arms.unsloth")
    arm.run(
        [Case(workload.name, "unsloth", mode)],
        files=WorkloadFiles(root, workload),
        log=CaseLog(root / "unsloth.jsonl"),
        device="cpu",
    )


@pytest.mark.parametrize(("mode", "checkpointing"), [("unsloth", "unsloth"), ("off", False)])
def test_unsloth_is_asked_for_full_finetuning(mode, checkpointing, peers, root):
    _run_unsloth(mode, FULL, root)
    assert peers.calls["load"]["full_finetuning"] is True
    assert peers.calls["load"]["load_in_4bit"] is False
    assert peers.calls["load"]["use_gradient_checkpointing"] == checkpointing
    assert "adapters" not in peers.calls
    # TRL's default would switch on again what was asked off; in the other mode Unsloth's own choice stands.
    assert peers.calls["config"].get("gradient_checkpointing", "left") == ("left" if checkpointing else False)


@pytest.mark.parametrize("mode", ["unsloth", "off"])
def test_unsloth_with_adapters_is_asked_for_what_it_ever_was(mode, peers, root):
    _run_unsloth(mode, WORKLOADS["tiny"], root)
    assert not {"full_finetuning", "use_gradient_checkpointing"} & set(peers.calls["load"])
    assert peers.calls["adapters"]["r"] == WORKLOADS["tiny"].lora_rank
    assert "gradient_checkpointing" not in peers.calls["config"]


@pytest.mark.parametrize(("mode", "checkpointing"), [("unsloth+fp8", "unsloth"), ("off+fp8", False)])
def test_unsloth_in_fp8_is_asked_for_an_fp8_base(mode, checkpointing, peers, root):
    _run_unsloth(mode, WORKLOADS["tiny-qlora"], root)
    assert peers.calls["load"]["load_in_fp8"] is True
    assert peers.calls["load"]["load_in_4bit"] is False
    assert peers.calls["adapters"]["use_gradient_checkpointing"] == checkpointing


def test_unsloth_without_fp8_keeps_the_precision_of_the_workload(peers, root):
    _run_unsloth("off", WORKLOADS["tiny-qlora"], root)
    assert "load_in_fp8" not in peers.calls["load"]
    assert peers.calls["load"]["load_in_4bit"] is True


def test_unsloth_trains_no_weights_held_in_fp8(peers, root):
    with pytest.raises(ValueError, match=r"'off\+fp8' holds frozen weights in fp8"):
        _run_unsloth("off+fp8", FULL, root)


def test_unsloth_leaves_no_layers_out_where_all_weights_are_trained(peers, root):
    with pytest.raises(ValueError, match="'skip-max' leaves layers out by an option of get_peft_model"):
        _run_unsloth("skip-max", FULL, root)


def test_trl_is_given_no_adapters(peers, root):
    from benchmarks.ruler.arms import trl

    trl.run(
        [Case(FULL.name, "trl", "keep")], files=WorkloadFiles(root, FULL), log=CaseLog(root / "trl.jsonl"), device="cpu"
    )
    assert peers.calls["trainer"]["peft_config"] is None


# The profile of a step


def _step_of_profile(root, out, *, workload):
    """Return step time, times of its phases and lines of kernels in the profile that the command writes."""
    arguments = [
        "--root",
        str(root),
        "--workload",
        workload,
        "--out",
        str(out),
        "--modes",
        "keep+fused",
        "--optimizer",
        "adamw_8bit",
    ]
    assert step_profile.main([*arguments, "--device", "cpu", "--warmup", "1", "--steps", "3"]) == 0
    name, head, phases, *kernels = (out / "profile.txt").read_text(encoding="utf-8").splitlines()
    assert name == workload
    assert head.startswith("keep+fused: step ")
    return float(head.split()[2]), {part.split()[0]: float(part.split()[1]) for part in phases.split(",")}, kernels


@pytest.mark.parametrize("workload", ["tiny-full", "tiny"])
def test_a_step_is_profiled_and_split_into_its_phases(workload, root, tmp_path, monkeypatch):
    own, loaded = {name: getattr(judge, name) for name in ("load_adapter", "load_weights")}, []
    for name in own:
        monkeypatch.setattr(
            judge,
            name,
            lambda model, tensors, name=name: (loaded.append((name, len(tensors))), own[name](model, tensors)),
        )
    _, phases, kernels = _step_of_profile(root, tmp_path, workload=workload)
    assert loaded == [("load_weights", NUM_TENSORS) if workload == "tiny-full" else ("load_adapter", 28)]
    assert list(phases) == list(step_profile.PHASES)
    assert len(kernels) > 10


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ("backward", "backward"),
        pytest.param("forward", "training_step", marks=pytest.mark.fault),
        pytest.param("clip", "configure_gradient_clipping", marks=pytest.mark.fault),
        pytest.param("optimizer", "optimizer_step", marks=pytest.mark.fault),
    ],
)
def test_a_phase_has_the_time_that_is_spent_in_it(phase, name, root, tmp_path, monkeypatch):
    own, pause_ms = getattr(FineTuner, name), 300

    def paused(*arguments, **options):
        found = own(*arguments, **options)
        time.sleep(pause_ms / 1e3)
        return found

    monkeypatch.setattr(FineTuner, name, paused)
    step_ms, phases, _ = _step_of_profile(root, tmp_path, workload="tiny-full")
    # A busy machine adds to any of them; each moment is in one phase only, so that the pause is in no other.
    assert phases[phase] >= pause_ms
    assert step_ms >= pause_ms
