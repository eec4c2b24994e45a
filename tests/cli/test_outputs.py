"""What a config may write to: ordinary folders go on working, and nothing of the user's is reached."""

import pytest
import yaml
from lightning.pytorch import Trainer

from lightning_fastft.cli.outputs import check_outputs, given_on_command_line
from lightning_fastft.cli.words import CONFIG_FOLDER
from lightning_fastft.core.checks import check_replaceable
from lightning_fastft.core.errors import OptionError
from lightning_fastft.packing.rows.rejects import Reject, is_rejects
from tests.cli.hostile_configs import BORING

REJECT = Reject("a.jsonl", 1, "NaN", "", "").to_json()


def trainer(**options):
    return {"trainer": options}


def checkpoint(**options):
    return trainer(callbacks=[{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": options}])


def logger(**options):
    return trainer(
        logger={
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"name": "lightning_logs", "version": None, **options},
        }
    )


def rejected(path):
    return {"data": {"class_path": "lightning_fastft.PackedDataModule", "init_args": {"rejected_path": path}}}


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home with a start-up file, notes, a run, and the current folder in it."""
    for name in (".bashrc", "notes/todo", "run/version_0/metrics.csv", "work/data/metrics.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "work" / "linked").symlink_to(tmp_path / "notes")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("path", sorted(CONFIG_FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_write_where_they_may(path, home):
    check_outputs(yaml.safe_load(path.read_text()), words=["fit", "--config", str(path)])


@pytest.mark.parametrize(
    "config",
    [
        checkpoint(dirpath="HOME/new"),
        checkpoint(dirpath="HOME/run"),
        checkpoint(dirpath="runs/first", filename="{epoch}-{val/loss:.2f}"),
        checkpoint(dirpath="~/new"),
        checkpoint(dirpath="s3://bucket/run"),
        checkpoint(dirpath="."),
        logger(save_dir="."),
        logger(save_dir="HOME/run", version=3),
        logger(save_dir="HOME/scratch", name="first", version="b"),
        trainer(default_root_dir="HOME/run", precision="bf16-mixed", profiler="simple"),
        {"data": {"init_args": {"cache_dir": "HOME/.cache/packs"}}},
        rejected("bad.jsonl"),
        rejected("out/bad.jsonl"),
        {"data": {"init_args": {"paths": "HOME/notes/todo", "val_paths": "../x.jsonl"}}},
    ],
)
def test_ordinary_places_are_taken(config, home):
    check_outputs(yaml.safe_load(yaml.safe_dump(config).replace("HOME", str(home))), words=["fit"])


@pytest.mark.parametrize(
    "config",
    [
        rejected("HOME/.bashrc"),
        rejected("../bad.jsonl"),
        rejected("linked/bad.jsonl"),
        rejected("Makefile"),
        rejected("file://HOME/bad.jsonl"),
        checkpoint(dirpath="HOME/notes"),
        checkpoint(dirpath="linked"),
        checkpoint(dirpath="HOME/.ssh"),
        checkpoint(dirpath="runs", filename="../../notes/x"),
        logger(save_dir=".", name="", version="data"),
        logger(save_dir=".", name="../notes"),
        logger(save_dir=".", version=".git"),
        trainer(default_root_dir="HOME"),
        *(
            trainer(callbacks=[{"class_path": "any.Callback", "init_args": {"unknown_option": path}}])
            for path in ("HOME/notes/x", "~/notes/x", "sqlite:notes.db")
        ),
    ],
)
def test_places_of_others_are_refused_in_a_file_and_taken_from_the_command_line(config, home):
    config = yaml.safe_load(yaml.safe_dump(config).replace("HOME", str(home)))
    with pytest.raises(OptionError, match="command line"):
        check_outputs(config, words=["fit", "--config", "x.yaml"])
    check_outputs(
        config,
        words=[
            "fit",
            f"--trainer={yaml.safe_dump(config.get('trainer'))}",
            f"--data={yaml.safe_dump(config.get('data'))}",
        ],
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (rejected("kept.jsonl"), "link"),
        (rejected("folder.jsonl"), "folder"),
        (checkpoint(dirpath="plain"), "is not a folder"),
        (checkpoint(dirpath="runs", filename=".profile"), "leaves the folder"),
        (logger(save_dir=".", name=".config"), "leaves the folder"),
        (trainer(callbacks=[{"init_args": {"exclude_batches_path": "settings.json"}}]), "no run wrote"),
        (rejected("a\0b.jsonl"), "NUL"),
        (checkpoint(dirpath=".shown/run"), "hidden part"),
    ],
)
def test_links_files_and_hidden_names_in_the_current_folder_are_refused(config, reason, home):
    """All of these lie inside the current folder, so that nothing else refuses them."""
    (home / "work/target.jsonl").write_text("mine")
    (home / "work/kept.jsonl").symlink_to(home / "work/target.jsonl")
    (home / "work/folder.jsonl").mkdir()
    (home / "work/.shown").symlink_to(home / "work/folder.jsonl")
    (home / "work/plain").write_text("mine")
    (home / "work/settings.json").write_text('{"mine": 1}')
    with pytest.raises(OptionError, match=reason):
        check_outputs(config, words=["fit"])


def test_options_of_allowed_classes_are_the_users_own(home):
    config = trainer(callbacks=[{"class_path": "mine.Export", "init_args": {"out": "/somewhere/model"}}])
    check_outputs(config, words=["fit"], allowed=["mine"])
    with pytest.raises(OptionError, match="out"):
        check_outputs(config, words=["fit"], allowed=["min"])


def test_the_command_line_vouches_for_its_own_values_only():
    given = given_on_command_line(
        ["fit", "--data.rejected_path", "/a.jsonl", "--config=/c.yaml", "--trainer.callbacks+=X"]
    )
    assert ("rejected_path", "/a.jsonl") in given
    assert not any(text == "/c.yaml" for _, text in given)
    assert ("dirpath", "/a.jsonl") not in given


def test_files_of_others_are_not_replaced_whoever_names_them(tmp_path):
    path = tmp_path / "rejected.jsonl"
    check_replaceable("rows", path, is_ours=is_rejects)
    for content in ("", REJECT, REJECT + "\n" + REJECT):
        path.write_text(content)
        check_replaceable("rows", path, is_ours=is_rejects)
    for content in ("export PATH=", '{"text": "mine"}', "[1]", '{"file": "mine"}'):
        path.write_text(content)
        with pytest.raises(OptionError, match="no run wrote"):
            check_replaceable("rows", path, is_ours=is_rejects)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for other in (tmp_path / "link", tmp_path):
        with pytest.raises(OptionError, match="link"):
            check_replaceable("rows", other, is_ours=is_rejects)


def test_a_config_of_the_users_own_is_not_replaced_by_the_saved_one(folder, answer):
    (folder / "config.yaml").write_text(BORING)
    for _ in range(2):
        assert answer(["fit", "--config", "config.yaml"])[0] == 0
    assert (folder / "config.yaml").read_text() == BORING
    assert (folder / "saved_config.yaml").read_text().startswith("# lightning")


def test_a_run_whose_logger_has_no_folder_saves_its_config_with_the_trainer(folder, answer, monkeypatch):
    # As with MLFlowLogger(tracking_uri="https://...").
    monkeypatch.setattr(Trainer, "log_dir", property(lambda trainer: None))
    (folder / "given.yaml").write_text(BORING)
    for _ in range(2):
        assert answer(["fit", "--config", "given.yaml", "--trainer.default_root_dir", "out"])[0] == 0
    assert (folder / "out/config.yaml").read_text().startswith("# lightning")


def test_control_characters_of_a_config_do_not_reach_the_terminal(folder, answer):
    (folder / "attack.yaml").write_text(BORING.replace("strategy: auto", 'strategy: auto, precision: "\\e[2Jowned"'))
    status, text = answer(["fit", "--config", "attack.yaml"])
    assert status == 2
    assert "\x1b" not in text
    assert "owned" in text
