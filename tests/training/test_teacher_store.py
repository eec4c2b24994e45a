"""A teacher's stored hidden states: the same training as with the live teacher, and stores that cannot be used."""

import json
import shutil

import pytest
import torch

from lightning_fastft.core.errors import DataError, OptionError
from lightning_fastft.training.distillation import check_same_tokens
from lightning_fastft.training.teacher_store import TeacherStore
from tests.support.training_parts import SaveAtStep
from tests.support.tuners import CONFIG
from tests.training.test_distillation import fit, make_student, make_teacher, record, rows
from tests.training.test_rollouts import character_tokenizer


def train(folder, teacher, *, max_steps=2, accumulate=1, data=None, callbacks=(), ckpt_path=None, **options):
    """A student after a run; accumulation, so that packs of a window get their own rows."""
    torch.manual_seed(0)
    student = record(make_student(teacher, **options))
    fit(
        student, folder, max_steps=max_steps, data=data, callbacks=list(callbacks), ckpt_path=ckpt_path,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    return student


def weights(student):
    return torch.cat([parameter.detach().flatten() for parameter in student.model.parameters()])


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    make_teacher().save_pretrained(folder)
    return folder


@pytest.fixture
def stored(tmp_path, teacher_folder):
    """The folder of a teacher, its store, and the one entry of the store after a run."""
    teacher = tmp_path / "teacher"
    shutil.copytree(teacher_folder, teacher)
    train(tmp_path, str(teacher), max_steps=1, store=str(tmp_path / "store"), top_k=None)
    (entry,) = (tmp_path / "store").iterdir()
    return teacher, tmp_path / "store", entry


@pytest.mark.covering
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "forward_kl"},
        {"kind": "reverse_kl", "temperature": 2.0},
        {"kind": "jsd", "beta": 0.3, "sft_weight": 0.2},
    ],
    ids=lambda options: options["kind"],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_hidden_states_train_as_the_live_teacher(tmp_path, teacher_folder, options, accumulate):
    teacher, length = str(teacher_folder), {"accumulate": accumulate, **options}
    live = train(tmp_path, teacher, **length)
    found = train(tmp_path, teacher, store=str(tmp_path / "store"), top_k=None, **length)
    assert found.frozen_model is None
    assert found.divergences == pytest.approx(live.divergences, rel=1e-5)
    # AdamW's first steps turn the rounding of a gradient near 0 into a step of its own.
    assert (weights(found) - weights(live)).norm() < 1e-4 * weights(live).norm()
    assert not any("teacher" in name for name in found.state_dict())


def test_one_store_serves_every_kind_without_the_teacher(tmp_path, stored, monkeypatch):
    teacher, folder, _ = stored
    shutil.rmtree(teacher)
    monkeypatch.setattr(TeacherStore, "write", lambda *_: pytest.fail("computed again"))
    for options in ({"kind": "jsd"}, {"temperature": 3.0}, {"vocab_size": 90}):
        train(tmp_path, str(teacher), store=str(folder), top_k=None, **options)


def test_bf16_teachers_are_stored_without_loss(tmp_path):
    teacher = make_teacher().bfloat16()
    live = train(tmp_path, teacher)
    found = train(tmp_path, teacher, store=str(tmp_path / "store"), top_k=None)
    assert found.divergences == pytest.approx(live.divergences, rel=1e-2)
    (entry,) = (tmp_path / "store").iterdir()
    assert json.loads((entry / "meta.json").read_text())["arrays"] == {"hidden_states": ["bfloat16", 48]}
    assert (entry / "hidden_states.bin").stat().st_size == 24 * 11 * 48 * 2


def test_a_run_goes_on_exactly_from_its_checkpoint(tmp_path, stored):
    teacher, folder, _ = stored
    options = {"store": str(folder), "top_k": None, "accumulate": 2, "max_steps": 5}
    whole = train(tmp_path, str(teacher), callbacks=[SaveAtStep(2, tmp_path / "two.ckpt")], **options)
    shutil.rmtree(teacher)
    resumed = train(tmp_path, str(teacher), ckpt_path=str(tmp_path / "two.ckpt"), **options)
    assert torch.equal(weights(whole), weights(resumed))


# Stores that cannot be used.


def cut(entry, teacher):
    with (entry / "hidden_states.bin").open("r+b") as file:
        file.truncate(100)


def change_head(entry, teacher):
    path = entry / "head.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def remove(entry, teacher):
    (entry / "hidden_states.bin").unlink()


def change_meta(entry, teacher):
    path = entry / "meta.json"
    path.write_text(path.read_text().replace('"scale": 1.0', '"scale": 2.0'))


def change_teacher(entry, teacher):
    make_teacher(hidden_size=64).save_pretrained(teacher)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut, ["hidden_states.bin has 100 bytes"]),
        (remove, ["hidden_states.bin", "No such file"]),
        (change_head, ["head.safetensors is damaged"]),
        (change_meta, ["meta.json is damaged"]),
        (change_teacher, ["the teacher in its folder has changed"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_store_is_refused_with_what_to_do(tmp_path, stored, damage, words):
    teacher, folder, entry = stored
    damage(entry, teacher)
    with pytest.raises(DataError) as caught:
        train(tmp_path, str(teacher), store=str(folder), top_k=None)
    for word in (*words, str(entry), "Delete the folder and run the same command again"):
        assert word in str(caught.value)


def test_a_store_of_other_data_in_its_place_is_refused(tmp_path, stored):
    teacher, folder, entry = stored
    train(tmp_path, str(teacher), store=str(folder), top_k=None, data=rows(24, seed=1))
    (other,) = set(folder.iterdir()) - {entry}
    shutil.rmtree(entry)
    other.rename(entry)
    with pytest.raises(DataError, match="was written for data"):
        train(tmp_path, str(teacher), store=str(folder), top_k=None)


def test_another_tokenizer_than_when_it_was_written_is_refused(tmp_path, teacher_folder):
    tokenizer, options = character_tokenizer(), {"store": str(tmp_path / "store"), "top_k": None}
    train(tmp_path, str(teacher_folder), tokenizer=tokenizer, **options)
    tokenizer.add_tokens(["<new>"])
    with pytest.raises(DataError, match="the tokenizer has changed"):
        train(tmp_path, str(teacher_folder), tokenizer=tokenizer, **options)


def test_a_teacher_with_another_vocabulary_is_refused_before_the_pass(tmp_path):
    options = {"store": str(tmp_path / "store"), "top_k": None}
    with pytest.raises(OptionError, match=f"teacher has 104 tokens, the student {CONFIG['vocab_size']}.*--model.vocab"):
        train(tmp_path, make_teacher(vocab_size=104), **options)
    train(tmp_path, make_teacher(vocab_size=104), vocab_size=CONFIG["vocab_size"], **options)


def test_a_teacher_with_other_tokens_is_refused(tmp_path, teacher_folder):
    ours, theirs = character_tokenizer(), character_tokenizer()
    check_same_tokens(ours, theirs, teacher="t", num_compared=None)
    first_new = len(ours)
    ours.add_tokens(["<new>"])
    check_same_tokens(ours, theirs, teacher="t", num_compared=first_new)
    with pytest.raises(OptionError, match=f"'<new>' has number {first_new}.*does not have it.*vocab_size={first_new}"):
        check_same_tokens(ours, theirs, teacher="t", num_compared=None)
    theirs.add_tokens(["<other>", "<new>"])
    folder = tmp_path / "teacher"
    shutil.copytree(teacher_folder, folder)
    theirs.save_pretrained(folder)
    for store in ({}, {"store": str(tmp_path / "store"), "top_k": None}):
        with pytest.raises(OptionError, match=f"has number {first_new + 1} for it"):
            train(tmp_path, str(folder), tokenizer=ours, **store)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, teacher_folder):
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"cannot be written.*--model.store FOLDER"):
        train(tmp_path, str(teacher_folder), store=str(tmp_path / "file"), top_k=None)
