import re
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from jsonargparse import Namespace

from lightning_fastft import cli, cli_imports
from lightning_fastft.cli import CONFIG_FOLDER, FastFTCLI, config_names, find_configs, main, take_option
from lightning_fastft.cli_doctor import shrink_config
from lightning_fastft.cli_imports import check_named_functions, take_allowed_imports
from lightning_fastft.demo.files import write_demo_files
from lightning_fastft.demo.generator import generate_rows
from lightning_fastft.errors import OptionError
from tests.hostile_configs import BORING, HOSTILE, hostile_text, write_traps


@pytest.fixture(scope="module")
def demo_files(tmp_path_factory):
    return write_demo_files(generate_rows(num_train=40, num_validation=4), tmp_path_factory.mktemp("demo"), vocab_size=320)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def answer(words, capsys) -> tuple[int, str]:
    """Run the command; return its exit status and what it wrote to standard error."""
    try:
        status = main(words)
    except SystemExit as stop:
        status = stop.code
    return status, capsys.readouterr().err


# What a config may import.


def run_hostile(name: str, folder: Path, demo_files) -> None:
    """Run one hostile config to its end, whatever that is."""
    write_traps(folder)
    sys.path.append(str(folder))
    (folder / "config.yaml").write_text(hostile_text(name, folder=folder, model=demo_files.model))
    # How it fails is no matter here.
    with suppress(SystemExit, Exception):
        main(["fit", "--config", "config.yaml"])


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_config_runs_no_code(name, folder, demo_files):
    run_hostile(name, folder, demo_files)
    assert not (folder / "canary").exists()
    assert "hostile" not in sys.modules


@pytest.mark.slow
@pytest.mark.parametrize("name", ["foreign model", "foreign hook", "pickle by a helper of lightning"])
def test_hostile_config_would_run_code_without_the_policy(name, folder, demo_files, monkeypatch):
    @contextmanager
    def no_policy(allowed=()):
        verdicts = {"import_path_verdicts": {}, "instantiate_subclass_spec_in_any": True}
        with monkeypatch.context() as patch:
            for key, value in verdicts.items():
                patch.setitem(parsing_settings(), key, value)
            yield

    monkeypatch.setattr(cli, "import_policy", no_policy)
    monkeypatch.setattr(cli, "check_named_functions", lambda *args: None)
    run_hostile(name, folder, demo_files)
    assert (folder / "canary").exists()


def parsing_settings() -> dict:
    from jsonargparse import _common

    return _common.parsing_settings


def test_named_package_is_allowed_for_one_command_only(folder, capsys):
    (folder / "my_package.py").write_text("from lightning.pytorch.demos.boring_classes import BoringModel\nclass MyModel(BoringModel): pass\n")
    words = ["fit", "--config", "config.yaml"]
    (folder / "config.yaml").write_text(BORING.replace("lightning.pytorch.demos.boring_classes.BoringModel", "my_package.MyModel"))
    status, text = answer(words, capsys)
    assert status == 2
    assert text.startswith("error: model: a config may not import 'my_package.MyModel'\n")
    assert "--allow-import my_package" in text
    assert answer([*words, "--allow-import", "my_package"], capsys)[0] == 0
    assert answer(words, capsys)[0] == 2


@pytest.mark.parametrize(
    "path",
    ["torch.load", "torch.hub.load", "lightning.fabric.utilities.cloud_io._load", "lightning.pytorch.cli.instantiate_class", "transformers.pipeline"],
)
def test_loaders_of_allowed_packages_are_refused(path):
    from jsonargparse._common import check_import_path

    with cli_imports.import_policy(), pytest.raises(ImportError, match="not allowed"):
        check_import_path(path)


def test_schedulers_of_transformers_and_classes_of_torch_are_allowed():
    from jsonargparse._common import check_import_path

    with cli_imports.import_policy():
        for path in (
            "transformers.get_cosine_schedule_with_warmup",
            "torch.optim.SGD",
            "lightning.pytorch.callbacks.ModelCheckpoint",
            "peft.LoraConfig",
        ):
            check_import_path(path)


def test_functions_of_allowed_packages_are_refused_and_those_named_on_the_command_line_are_not():
    config = Namespace(fit=Namespace(model=Namespace(class_path="lightning_fastft.FineTuner"), hooks=[{"class_path": "lightning_fastft.cli.main"}]))
    with pytest.raises(OptionError, match=r"fit\.hooks: a config may name classes, and 'lightning_fastft.cli.main' is none"):
        check_named_functions(config)
    check_named_functions(config, ["lightning_fastft.cli"])
    with pytest.raises(OptionError, match="find_configs"):
        check_named_functions(Namespace(hook=find_configs))


def test_allow_import_takes_dotted_paths_only():
    assert take_allowed_imports(["fit", "--allow-import=a.b", "--x", "1", "--allow-import", "c"]) == (["fit", "--x", "1"], ["a.b", "c"])
    for words in (["--allow-import"], ["--allow-import", "a-b"], ["--allow-import=*"]):
        with pytest.raises(OptionError, match="dotted import path"):
            take_allowed_imports(words)
    with pytest.raises(OptionError, match="jsonargparse"), cli_imports.import_policy(["jsonargparse"]):
        pass


def test_checkpoint_from_elsewhere_is_refused(folder, capsys):
    (folder / "config.yaml").write_text(BORING)
    for path in ("https://example.org/x.ckpt", "registry:model:version"):
        status, text = answer(["validate", "--config", "config.yaml", "--ckpt_path", path], capsys)
        assert status == 1
        assert "ckpt_path must be a local file" in text


# Answers.


@pytest.mark.parametrize(
    ("words", "reason", "hint"),
    [
        (["--trainer.max_stps", "2"], "unrecognized arguments: --trainer.max_stps 2", "trainer.max_steps"),
        (["--model.lerning_rate", "2"], "model: Option 'lerning_rate' is not accepted by lightning_fastft", "learning_rate"),
        (["--trainer.max_steps", "many"], "trainer.max_steps: Expected a <class 'int'>. Got value: many", ""),
        (
            ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.dirpth", "x"],
            "trainer.callbacks: Option 'dirpth'",
            "dirpath",
        ),
        (["--config", "wrong.yaml"], "Subcommand 'fit' does not accept option 'trainer.max_stps'", "trainer.max_steps"),
        (["--data.class_path", "nowhere.Data"], "data: a config may not import 'nowhere.Data'", ""),
    ],
)
def test_wrong_argument_answers_with_the_reason_first(words, reason, hint, folder, capsys):
    (folder / "wrong.yaml").write_text("trainer: {max_stps: 2}\n")
    status, text = answer(["fit", "--model.model", "x", "--data.paths", "y", *words], capsys)
    lines = text.splitlines()
    assert status == 2
    assert lines[0].startswith(f"error: {reason}")
    assert len(lines) <= 3
    assert not hint or f"did you mean {hint}?" in lines[1]


def test_refused_value_answers_with_the_reason(folder, capsys):
    status, text = answer(["fit", "--model.model", "x", "--data.paths", "y", "--data.max_tokens", "-1"], capsys)
    assert status == 1
    assert "max_tokens must be" in text
    assert "Traceback" not in text


def test_help_names_every_command_and_config(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for word in ("fit", "validate", "test", "data", "doctor", "demo", *config_names()):
        assert word in text
    assert answer(["frobnicate"], capsys) == (
        1,
        "error: OptionError: Unknown command 'frobnicate'; there are fit, validate, test, data, doctor and demo.\n",
    )


def test_configs_are_found_by_name_and_by_path(folder):
    (folder / "demo.yaml").write_text("")
    assert find_configs(["--config", "demo.yaml", "--x", "demo"]) == ["--config", "demo.yaml", "--x", "demo"]
    assert find_configs(["-c", "demo", "--config=qlora_qwen3_8b"]) == [
        "-c",
        str(CONFIG_FOLDER / "demo.yaml"),
        f"--config={CONFIG_FOLDER / 'qlora_qwen3_8b.yaml'}",
    ]
    with pytest.raises(OptionError, match="Did you mean qlora_qwen3_8b"):
        find_configs(["--config", "qlora_qwen_8b"])


def test_own_options_are_taken_from_the_arguments():
    assert take_option(["--a", "--out=x", "b"], "--out", default="y") == ("x", ["--a", "b"])
    assert take_option(["--a"], "--out", default="y") == ("y", ["--a"])
    with pytest.raises(OptionError, match="needs a value"):
        take_option(["--out"], "--out", default="y")


# Commands.


def tiny_words(demo_files) -> list[str]:
    return [
        *(
            "--config",
            "demo",
            "--model.model",
            str(demo_files.model),
            "--data.paths",
            str(demo_files.train),
            "--data.val_paths",
            str(demo_files.validation),
        ),
        *("--data.max_tokens", "1024", "--data.cache_dir", "null", "--data.show_progress", "false", "--data.num_proc", "1"),
        *("--trainer.max_steps", "3", "--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_model_summary", "false"),
    ]


@pytest.mark.slow
def test_fit_trains_and_saves_its_config(folder, demo_files):
    run = FastFTCLI(["fit", *tiny_words(demo_files), "--trainer.default_root_dir", "out"])
    assert run.trainer.global_step == 3
    assert type(run.trainer.strategy).__name__ == "FastFTStrategy"
    assert (folder / "out" / "config.yaml").is_file()
    assert main(["fit", *tiny_words(demo_files), "--trainer.default_root_dir", "out"]) == 0, "a second run may overwrite the saved config"


@pytest.mark.slow
def test_settings_of_a_checkpoint_do_not_override_the_command_line(folder, demo_files):
    first = FastFTCLI(["fit", *tiny_words(demo_files)])
    first.trainer.save_checkpoint("a.ckpt")
    second = FastFTCLI(["validate", *tiny_words(demo_files), "--model.warmup_share", "0.5", "--ckpt_path", "a.ckpt"])
    assert second.model.warmup_share == 0.5


@pytest.mark.slow
def test_data_describes_without_training(folder, demo_files, capsys):
    assert main(["data", *tiny_words(demo_files), "--out", "pictures"]) == 0
    text = capsys.readouterr().out
    assert "40 rows, 40 examples" in text
    assert "fill" in text
    assert "⟦" in text
    assert (folder / "pictures" / "lengths.png").is_file()


@pytest.mark.slow
def test_doctor_shows_what_is_active_without_the_data(folder, demo_files, capsys):
    words = ["--config", "lora_qwen3_0.6b", "--model.model", str(demo_files.model), "--model.dtype", "bfloat16", "--trainer.accelerator", "cpu"]
    assert main(["doctor", *words]) == 0
    text = capsys.readouterr().out
    assert "packed attention" in text
    assert "ran: " in text
    assert re.search(r"adapter shadows +active", text)
    assert list(folder.iterdir()) == []


def test_doctor_refuses_modules_that_it_cannot_shrink(folder, capsys):
    (folder / "config.yaml").write_text(BORING)
    status, text = answer(["doctor", "--config", "config.yaml"], capsys)
    assert status == 1
    assert "miniature" in text


def test_miniature_keeps_every_kind_of_layer():
    config = {"num_hidden_layers": 12, "layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 6, "num_experts": 64}
    small = shrink_config(config)
    assert small["num_hidden_layers"] == len(small["layer_types"]) == 6
    assert set(small["layer_types"]) == set(config["layer_types"])
    assert small["num_experts"] == 8
    assert shrink_config({"text_config": config, "vision_config": {}})["text_config"] == small


@pytest.mark.slow
def test_command_runs_as_a_process(folder):
    done = subprocess.run([sys.executable, "-m", "lightning_fastft", "fit", "--trainer.max_stps=2"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean trainer.max_steps?" in done.stderr
