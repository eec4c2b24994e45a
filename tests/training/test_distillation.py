"""DistillationTuner: divergences of packed documents against each document alone, stored tokens, and a small student."""

import copy
import shutil

import pytest
import torch

from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.collate import collate
from lightning_fastft.strategies.single_device import FastFTStrategy
from lightning_fastft.training.datamodule import PackedDataModule
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.preference import PreferenceTuner
from lightning_fastft.training.teacher_store import TeacherStore
from tests.support.packs import assert_close, make_documents
from tests.support.training_parts import quiet_trainer
from tests.support.tuners import CONFIG, gradients, make_tuner, packed

LENGTHS = (9, 4, 12, 7)


def make_teacher(**changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CONFIG, "hidden_size": 48, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model


def rows_of(model, document):
    """Logits of the rows whose next token is labelled, from the document alone."""
    logits = model(input_ids=torch.as_tensor(document.input_ids)[None], use_cache=False).logits[0, :-1].double()
    labels = torch.as_tensor(document.labels)[1:]
    return logits[labels != -100], labels[labels != -100]


def divergence_alone(tuner, teacher, documents):
    total, count = 0.0, 0
    for document in documents:
        student, targets = rows_of(tuner.model, document)
        with torch.no_grad():
            other, _ = rows_of(teacher, document)
        q, p = (x.div(tuner.temperature).log_softmax(-1) for x in (student, other))
        if tuner.kind == "forward_kl":
            loss = (p.exp() * (p - q)).sum()
        elif tuner.kind == "reverse_kl":
            loss = (q.exp() * (q - p)).sum()
        else:
            mixture = (tuner.beta * p.exp() + (1 - tuner.beta) * q.exp()).log()
            loss = (tuner.beta * p.exp() * (p - mixture)).sum() + ((1 - tuner.beta) * q.exp() * (q - mixture)).sum()
        nll = -student.log_softmax(-1).gather(1, targets[:, None]).sum()
        total = total + (1 - tuner.sft_weight) * loss + tuner.sft_weight * nll
        count += len(targets)
    return total / count


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "reverse_kl"}, {"kind": "jsd", "beta": 0.3}, {"temperature": 2.0}, {"sft_weight": 0.25}],
    ids=lambda options: "-".join(map(str, options.values())) or "forward_kl",
)
def test_packed_documents_diverge_as_each_alone(options):
    teacher = make_teacher()
    tuner, documents = make_tuner(DistillationTuner, teacher=teacher, **options), make_documents(LENGTHS)
    batch = collate(documents)
    with packed(tuner):
        loss = tuner.training_step(batch, 0)
        loss.backward()
    ours = gradients(tuner)
    truth = divergence_alone(tuner, teacher, documents)
    truth.backward()
    assert_close(loss.detach(), truth.detach().float())
    assert_close(ours, gradients(tuner), bound=2e-5)
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert tuner.logged.keys() == {name for name in tuner.logged_names if name.startswith("train_")}
    assert not any("frozen" in name for name in tuner.state_dict())


def rows(num_rows, *, seed=0):
    draws = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 97, (12,), generator=draws).tolist()} for _ in range(num_rows)]


def fit(tuner, folder, *, max_steps, data=None, ckpt_path=None, **options):
    data = PackedDataModule(data or rows(24), max_tokens=48, num_workers=0, cache_dir=None, num_proc=1)
    trainer = quiet_trainer(folder, max_steps=max_steps, strategy=FastFTStrategy(), **options)
    trainer.fit(tuner, data, ckpt_path=ckpt_path)
    return trainer


def make_student(teacher, **options):
    return DistillationTuner(
        copy.deepcopy(CONFIG), init="random", dtype="float32", teacher=teacher, learning_rate=1e-2, scheduler="constant",
        warmup_steps=0, **options,
    )  # fmt: skip


def record(tuner):
    """Keep what a tuner logs as its divergence."""
    own_log, tuner.divergences = tuner.log, []

    def log(name, value, **options):
        if name == "train_divergence":
            tuner.divergences.append(float(value))
        own_log(name, value, **options)

    tuner.log = log
    return tuner


@pytest.mark.parametrize("store", [False, True])
def test_a_student_nears_its_teacher(tmp_path, store):
    teacher = make_teacher()
    student = record(make_student(teacher, **({"store": str(tmp_path / "store"), "top_k": 32} if store else {})))
    fit(student, tmp_path, max_steps=120)
    assert sum(student.divergences[-6:]) < 0.5 * sum(student.divergences[:6])


def test_stored_tokens_are_computed_once_and_read_again(tmp_path, monkeypatch):
    teacher, folder = make_teacher(), tmp_path / "store"
    options = {"store": str(folder), "top_k": 96}
    first = record(make_student(teacher, **options))
    fit(first, tmp_path / "a", max_steps=2)
    assert first.frozen_model is None
    monkeypatch.setattr(TeacherStore, "write", lambda *_: pytest.fail("computed again"))
    second = record(make_student(make_teacher(), **options))
    fit(second, tmp_path / "b", max_steps=2)
    assert first.divergences == second.divergences
    # All tokens but one are stored, so the stored divergence is that of the live teacher.
    live = record(make_student(teacher))
    fit(live, tmp_path / "c", max_steps=2)
    assert first.divergences[0] == pytest.approx(live.divergences[0], rel=1e-5)


def test_a_teacher_by_name_is_read_to_fill_the_store_and_not_again(tmp_path):
    make_teacher().save_pretrained(tmp_path / "teacher")
    options = {"store": str(tmp_path / "store"), "top_k": 31}
    first = record(make_student(str(tmp_path / "teacher"), **options))
    fit(first, tmp_path / "a", max_steps=2)
    assert first.frozen_model is None
    shutil.rmtree(tmp_path / "teacher")
    second = record(make_student(str(tmp_path / "teacher"), **options))
    fit(second, tmp_path / "b", max_steps=2)
    assert first.divergences == second.divergences


def test_another_teacher_has_a_store_of_its_own(tmp_path):
    folder = tmp_path / "store"
    for seed_width in (48, 64):
        fit(make_student(make_teacher(hidden_size=seed_width), store=str(folder), top_k=4), tmp_path, max_steps=1)
    assert len(list(folder.iterdir())) == 2


def test_a_store_serves_forward_kl_alone():
    with pytest.raises(OptionError, match="forward_kl"):
        make_tuner(DistillationTuner, teacher="none", store="x", kind="jsd")


@pytest.mark.parametrize("file", ["adapters/adapter_config.json", "run.ckpt"])
def test_a_trained_model_that_is_not_whole_is_no_teacher_and_no_reference(tmp_path, file):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("{}")
    given = str(path if path.suffix == ".ckpt" else path.parent)
    for tuner_class, options in ((DistillationTuner, {"teacher": given}), (PreferenceTuner, {"reference": given})):
        with pytest.raises(OptionError, match=r"fastft export .* --merge"):
            make_tuner(tuner_class, **options)


def test_a_second_model_that_is_not_there_is_named_by_its_option(tmp_path):
    given = str(tmp_path / "nothing")
    for tuner_class, option in ((DistillationTuner, "teacher"), (PreferenceTuner, "reference")):
        with pytest.raises(OptionError, match=rf"There is no folder or file .*Correct {option}"):
            make_tuner(tuner_class, **{option: given})


@pytest.mark.parametrize(("options", "name"), [({"beta": 0.9}, "beta"), ({"top_k": 8}, "top_k")])
def test_options_without_an_effect_are_refused(options, name):
    with pytest.raises(OptionError, match=f"{name}=.* has no effect"):
        make_tuner(DistillationTuner, teacher=make_teacher(), **options)


def test_a_teacher_is_no_part_of_a_whole_student():
    """Where every weight is trained, every parameter of the module is saved."""
    teacher = make_teacher()
    tuner = make_tuner(DistillationTuner, teacher=teacher, lora=None)
    assert tuner.frozen_model is teacher
    assert {name.partition(".")[0] for name in tuner.state_dict()} == {"model"}


def test_the_status_table_says_that_a_teacher_keeps_no_activations(tmp_path):
    trainer = fit(make_student(make_teacher()), tmp_path, max_steps=1)
    found = {status.name: status for status in trainer.strategy.statuses()}
    assert found["activations (model)"].state == "active"
    # As it is, not as it was installed.
    assert "on a CPU every activation is kept" in found["activations (model)"].reason
    assert found["activations (model)"].reason.count("layers") == 1
    assert found["activations (frozen_model)"].state == "inactive"
    assert "frozen" in found["activations (frozen_model)"].reason
    assert found["packed attention (frozen_model)"].state == "active"
