import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace

from lightning_fastft.cli import lightning_cli, main
from lightning_fastft.cli.imports import check_named_functions, import_policy
from lightning_fastft.cli.words import find_configs, take_allowed_imports
from lightning_fastft.cli.yaml_text import check_size
from lightning_fastft.core.errors import OptionError
from tests.cli.hostile_configs import BORING, HOSTILE, hostile_text, write_traps


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

    monkeypatch.setattr(lightning_cli, "import_policy", no_policy)
    monkeypatch.setattr(lightning_cli, "check_named_functions", lambda *args: None)
    run_hostile(name, folder, demo_files)
    assert (folder / "canary").exists()


def parsing_settings() -> dict:
    from jsonargparse import _common

    return _common.parsing_settings


def test_named_package_is_allowed_for_one_command_only(folder, answer):
    (folder / "my_package.py").write_text(
        "from lightning.pytorch.demos.boring_classes import BoringModel\nclass MyModel(BoringModel): pass\n"
    )
    words = ["fit", "--config", "config.yaml"]
    (folder / "config.yaml").write_text(
        BORING.replace("lightning.pytorch.demos.boring_classes.BoringModel", "my_package.MyModel")
    )
    status, text = answer(words)
    assert status == 2
    assert text.startswith("error: model: a config may not import 'my_package.MyModel'\n")
    assert "--allow-import my_package" in text
    assert answer([*words, "--allow-import", "my_package"])[0] == 0
    assert answer(words)[0] == 2


@pytest.mark.parametrize(
    "path",
    [
        "torch.load",
        "torch.hub.load",
        "lightning.fabric.utilities.cloud_io._load",
        "lightning.pytorch.cli.instantiate_class",
        "transformers.pipeline",
        "lightning.pytorch.callbacks.LambdaCallback",
        "lightning.pytorch.callbacks.lambda_function.LambdaCallback",
        "torchmetrics.text.BERTScore",
        "torchmetrics.text.InfoLM",
        "torchmetrics.text.ROUGEScore",
        "torchmetrics.text.SacreBLEUScore",
        "torchmetrics.text.bert.BERTScore",
        "torchmetrics.text.infolm.InfoLM",
        "torchmetrics.multimodal.CLIPScore",
        "torchmetrics.wrappers.FeatureShare",
    ],
)
def test_loaders_of_allowed_packages_are_refused(path):
    from jsonargparse._common import check_import_path

    with import_policy(), pytest.raises(ImportError, match="not allowed"):
        check_import_path(path)


def test_schedulers_of_transformers_and_classes_of_torch_are_allowed():
    from jsonargparse._common import check_import_path

    with import_policy():
        for path in (
            "transformers.get_cosine_schedule_with_warmup",
            "torch.optim.SGD",
            "lightning.pytorch.callbacks.ModelCheckpoint",
            "peft.LoraConfig",
        ):
            check_import_path(path)


def test_functions_of_allowed_packages_are_refused_and_those_named_on_the_command_line_are_not():
    config = Namespace(
        fit=Namespace(
            model=Namespace(class_path="lightning_fastft.FineTuner"),
            hooks=[{"class_path": "lightning_fastft.cli.main"}],
        )
    )
    with pytest.raises(OptionError, match=r"fit\.hooks: a config may name classes, and 'lightning_fastft.cli.main'"):
        check_named_functions(config)
    check_named_functions(config, ["lightning_fastft.cli"])
    with pytest.raises(OptionError, match="find_configs"):
        check_named_functions(Namespace(hook=find_configs))


def test_allow_import_takes_dotted_paths_only():
    assert take_allowed_imports(["fit", "--allow-import=a.b", "--x", "1", "--allow-import", "c"]) == (
        ["fit", "--x", "1"],
        ["a.b", "c"],
    )
    for words in (["--allow-import"], ["--allow-import", "a-b"], ["--allow-import=*"]):
        with pytest.raises(OptionError, match="dotted import path"):
            take_allowed_imports(words)
    with pytest.raises(OptionError, match="jsonargparse"), import_policy(["jsonargparse"]):
        pass


def test_checkpoint_from_elsewhere_is_refused(folder, answer):
    (folder / "config.yaml").write_text(BORING)
    for path in ("https://example.org/x.ckpt", "registry:model:version"):
        status, text = answer(["validate", "--config", "config.yaml", "--ckpt_path", path])
        assert status == 1
        assert "ckpt_path must be a local file" in text


def test_text_that_unfolds_or_nests_without_end_is_refused():
    check_size("a: &a [1, 2]\nb: [*a, *a]\nc: *unknown")
    check_size("- " * 50 + "x")
    check_size("[" * 5)
    for text in (HOSTILE["aliases of aliases"], HOSTILE["endless nesting"], "- " * 200 + "x", f"[{'x, ' * 100_001}]"):
        with pytest.raises(yaml.YAMLError, match="levels"):
            check_size(text)
