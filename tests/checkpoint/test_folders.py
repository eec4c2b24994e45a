"""Folders of pieces: an index or a piece that asks for code is refused before torch reads it, and damage before
anything is loaded.
"""

import pickle
from io import BytesIO
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    load,
    save,
)
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from lightning_fastft.checkpoint.files import commit_folder, read_record
from lightning_fastft.checkpoint.folders import _PlainPlanner, check_index, load_folder, read_folder, save_folder
from lightning_fastft.checkpoint.settings import STATE as STATE_OF_RESUME
from lightning_fastft.core.errors import (
    CheckpointNotSavedError,
    DamagedCheckpointError,
    ResumeError,
    UnsafeCheckpointError,
)
from tests.checkpoint.test_files import Runs

STATE = {
    "weight": torch.arange(6.0),
    "optimizer_0": {"lr": 0.1, "betas": (0.9, 0.99), "step": torch.tensor(3.0), "x": None},
}


def write(folder):
    save(STATE, storage_writer=FileSystemWriter(folder), no_dist=True)


def test_index_and_pieces_of_torch_pass(tmp_path):
    write(tmp_path)
    check_index(tmp_path / ".metadata")
    found = {"weight": torch.zeros(6), "optimizer_0": {"lr": 0.0, "betas": (), "step": torch.tensor(0.0), "x": 1}}
    load(found, storage_reader=FileSystemReader(tmp_path), planner=_PlainPlanner(), no_dist=True)
    assert torch.equal(found["weight"], STATE["weight"])
    assert found["optimizer_0"] == STATE["optimizer_0"]


@pytest.mark.parametrize("content", ["call", "builtin", "nested"])
def test_hostile_index_is_refused(tmp_path, content):
    file = tmp_path / ".metadata"
    hostile = {
        "call": pickle.dumps(Runs(tmp_path / "ran")),
        "builtin": b'cbuiltins\neval\n(S\'open("ran", "w")\'\ntR.',
        # A function that a module of the allowed ones has imported.
        "nested": b"\x80\x04\x8c#torch.distributed.checkpoint.metadata\x8c\x02os\x93.",
    }[content]
    file.write_bytes(hostile)
    with pytest.raises((UnsafeCheckpointError, pickle.UnpicklingError)):
        check_index(file)
    assert not (tmp_path / "ran").exists()


class _GetAttribute:
    """Pickles as early releases of Python 3.11 pickle the member of an enumeration."""

    def __init__(self, *arguments):
        self._arguments = arguments

    def __reduce__(self):
        return getattr, self._arguments


def test_members_of_enumerations_pass_in_the_form_of_python_3_11_0(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_GetAttribute(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")))
    check_index(tmp_path / ".metadata")


@pytest.mark.parametrize(
    ("kind", "name"), [(_MEM_FORMAT_ENCODING, "__class__"), (Metadata, "__init__"), ("text", "format")]
)
def test_attributes_of_anything_else_are_refused(tmp_path, kind, name):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_GetAttribute(kind, name)))
    with pytest.raises(UnsafeCheckpointError, match="not allowed"):
        check_index(tmp_path / ".metadata")


def test_hostile_piece_is_refused(tmp_path):
    buffer = BytesIO()
    torch.save(Runs(tmp_path / "ran"), buffer)
    buffer.seek(0)
    with (
        mock.patch.object(DefaultLoadPlanner, "load_bytes") as unguarded,
        pytest.raises(UnsafeCheckpointError, match="lr of the checkpoint"),
    ):
        _PlainPlanner().load_bytes(SimpleNamespace(dest_index=SimpleNamespace(fqn="lr")), buffer)
    assert not unguarded.called
    assert not (tmp_path / "ran").exists()


def test_torch_itself_would_run_it(tmp_path):
    """Why the planner is needed: the day this fails it can go."""
    save({"lr": Runs(tmp_path / "ran")}, storage_writer=FileSystemWriter(tmp_path / "a"), no_dist=True)
    try:
        load({"lr": 0}, storage_reader=FileSystemReader(tmp_path / "a"), no_dist=True)
    except CheckpointException:
        pytest.fail("torch refuses it now")
    assert (tmp_path / "ran").exists()


class Sharded:
    """A module and its optimizer as one rank of a group holds them, and its checkpoint."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        self.module = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1 * seed)
        self.module(torch.ones(3)).sum().backward()
        self.optimizer.step()

    def checkpoint(self):
        states = [get_optimizer_state_dict(self.module, self.optimizer)]
        return {"state_dict": get_model_state_dict(self.module), "optimizer_states": states, "epoch": 4, "names": ["a"]}

    def load(self, path, **options):
        return load_folder(path, module=self.module, optimizers=[self.optimizer], strict=True, **options)

    def values(self):
        return [self.module.weight.detach().clone(), self.optimizer.state[self.module.weight]["exp_avg"].clone()]


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    (tmp_path / "saved").mkdir()
    return tmp_path / "saved"


def test_folder_brings_back_weights_moments_and_the_rest(group):
    saved, other = Sharded(1), Sharded(2)
    for _ in range(2):
        save_folder(saved.checkpoint(), group / "a.ckpt")
    assert [place.name for place in group.iterdir()] == ["a.ckpt"]
    assert sorted(read_record(group / "a.ckpt")) == [".metadata", "__0_0.distcp", "meta.pt"]
    rest = other.load(group / "a.ckpt")
    assert all(torch.equal(one, two) for one, two in zip(saved.values(), other.values()))
    assert other.optimizer.param_groups[0]["lr"] == 0.1
    assert rest == {"epoch": 4, "names": ["a"]}


@pytest.mark.parametrize("is_setting", [True, False])
def test_another_option_that_is_a_setting_of_the_module_is_not_reported_again(group, is_setting, recwarn):
    # ExactResume reports settings that differ.
    saved, other = Sharded(1), Sharded(2)
    settings = {"weight_decay": 0.1} if is_setting else {}
    for run, value in ((saved, 0.1), (other, 0.2)):
        run.optimizer.defaults["weight_decay"] = run.optimizer.param_groups[0]["weight_decay"] = value
        run.module.hparams = {"weight_decay": value}
    save_folder({**saved.checkpoint(), STATE_OF_RESUME: {"settings": settings}}, group / "a.ckpt")
    other.load(group / "a.ckpt")
    said = [text for warning in recwarn if "weight_decay" in (text := str(warning.message))]
    assert len(said) == (0 if is_setting else 1)
    assert all("weight_decay was 0.1 and is 0.2 (the checkpoint's is used)" in text for text in said)
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.1


def test_one_process_reads_the_whole_weights_of_a_folder(group):
    saved = Sharded(1)
    save_folder(saved.checkpoint(), group / "a.ckpt")
    dist.destroy_process_group()
    content = read_folder(group / "a.ckpt")
    weights = content.pop("state_dict")
    assert weights.keys() == {"weight", "bias"}
    assert all(torch.equal(weights[name], value) for name, value in saved.module.state_dict().items())
    assert content == {"epoch": 4, "names": ["a"]}
    data = bytearray((group / "a.ckpt" / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 2
    (group / "a.ckpt" / "__0_0.distcp").write_bytes(data)
    with pytest.raises(DamagedCheckpointError):
        read_folder(group / "a.ckpt")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "meta.pt", "commit.json", "judge"])
def test_nothing_of_a_folder_that_is_damaged_or_refused_is_loaded(group, name):
    saved, other = Sharded(1), Sharded(2)
    save_folder(saved.checkpoint(), group / "a.ckpt")
    before, options, error = other.values(), {}, DamagedCheckpointError
    if name == "judge":

        def refuse(rest):
            raise ResumeError(str(rest["epoch"]))

        options, error = {"judge": refuse}, ResumeError
    else:
        data = bytearray((group / "a.ckpt" / name).read_bytes())
        data[len(data) // 2] ^= 2
        (group / "a.ckpt" / name).write_bytes(data)
    with pytest.raises(error):
        other.load(group / "a.ckpt", **options)
    assert all(torch.equal(one, two) for one, two in zip(before, other.values()))


def test_failed_save_leaves_the_old_folder_and_no_part(group):
    saved = Sharded(1)
    save_folder(saved.checkpoint(), group / "a.ckpt")
    checkpoint = {**Sharded(2).checkpoint(), "optimizer_states": [{"x": lambda: None}]}
    with pytest.raises((CheckpointNotSavedError, AttributeError, pickle.PicklingError)):
        save_folder(checkpoint, group / "a.ckpt")
    assert [place.name for place in group.iterdir()] == ["a.ckpt"]
    other = Sharded(3)
    other.load(group / "a.ckpt")
    assert all(torch.equal(one, two) for one, two in zip(saved.values(), other.values()))


@pytest.mark.parametrize("place", ["index", "piece"])
def test_hostile_folder_with_a_good_record_runs_nothing(group, place):
    """A record says that bytes are those that were written, not who wrote them."""
    checkpoint = Sharded(1).checkpoint()
    if place == "piece":
        checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = Runs(group / "ran")
    save_folder(checkpoint, group / "a.ckpt")
    if place == "index":
        (group / "a.ckpt" / ".metadata").write_bytes(pickle.dumps(Runs(group / "ran")))
        commit_folder(group / "a.ckpt")
    with pytest.raises((UnsafeCheckpointError, CheckpointException), match=r"names .*open|no tensor and no plain type"):
        Sharded(2).load(group / "a.ckpt")
    assert not (group / "ran").exists()
