"""The revision of a base on the hub goes with its adapters: two revisions with other weights, in a hub cache."""

import json
from pathlib import Path

import huggingface_hub
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftConfig
from transformers import AutoModelForCausalLM

from lightning_fastft.cli.command import main
from lightning_fastft.cli.trained.card import read_facts, render_card
from lightning_fastft.core.errors import OptionError
from lightning_fastft.hf.added_tokens import find_resized
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.training_parts import packed_loader, quiet_trainer

register_strategies()

NAME = "org/tiny"
IDS = torch.arange(3, 15).unsqueeze(0)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache with two revisions of one model; "dev" has more rows of tokens too."""
    folder = tmp_path / "hub"
    place = folder / "models--org--tiny"
    for seed, revision in enumerate(("main", "dev")):
        torch.manual_seed(seed)
        commit = str(seed) * 40
        build_tiny("qwen3", vocab_size=VOCABULARY + seed).save_pretrained(place / "snapshots" / commit)
        (place / "refs").mkdir(exist_ok=True)
        (place / "refs" / revision).write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return place


def train(tmp_path, **options):
    module = FineTuner(NAME, dtype="float32", learning_rate=2e-2, **{"lora": {"r": 4}, "revision": "dev", **options})
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=2)
    trainer.fit(module, packed_loader(2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    return module


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_saved_adapters_name_the_revision_and_stock_peft_loads_it(hub, tmp_path):
    module = train(tmp_path)
    module.save_pretrained(str(tmp_path / "saved"))
    assert main(["export", str(tmp_path / "a.ckpt"), str(tmp_path / "out")]) == 0
    expected = logits_of(module.model)
    for name in ("saved", "out"):
        assert PeftConfig.from_pretrained(str(tmp_path / name)).revision == "dev"
        assert torch.equal(logits_of(AutoPeftModelForCausalLM.from_pretrained(tmp_path / name)), expected)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "org/tiny (revision `dev`)" in card
    assert f'"{NAME}", revision="dev"' in card
    assert 'revision="dev"' in render_card(read_facts(tmp_path / "saved"))


def test_adapters_are_merged_into_the_revision_that_they_were_trained_on(hub, tmp_path):
    module = train(tmp_path)
    module.save_pretrained(str(tmp_path / "saved"))
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits_of(merged), logits_of(module.model))


def test_a_base_that_is_named_anew_has_no_revision(hub, tmp_path):
    module = train(tmp_path)
    module.save_pretrained(str(tmp_path / "saved"))
    elsewhere = next((hub / "snapshots").glob("1*"))
    assert main(["export", str(tmp_path / "saved"), str(tmp_path / "out"), "--base", str(elsewhere)]) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (str(elsewhere), None)


def test_adapters_of_another_revision_are_refused_unless_accepted(hub, tmp_path):
    # Both have the same sizes here, so that nothing else tells them apart.
    torch.manual_seed(2)
    build_tiny("qwen3", vocab_size=VOCABULARY + 1).save_pretrained(next((hub / "snapshots").glob("0*")))
    train(tmp_path).save_pretrained(str(tmp_path / "saved"))
    for option in ("adapter", "frozen_adapters"):
        folder = str(tmp_path / "saved")
        given = {"adapter": folder} if option == "adapter" else {option: [folder], "lora": {"r": 2}}
        with pytest.raises(OptionError, match=r"revision 'dev'.*--model.revision dev"):
            FineTuner(NAME, **given).configure_model()
        FineTuner(NAME, **given, revision="dev").configure_model()
        FineTuner(NAME, **given, revision="1" * 40, accept_other_base=True).configure_model()
    module = FineTuner(NAME, adapter=str(tmp_path / "saved"), accept_other_base=True)
    module.configure_model()
    assert module.model.peft_config["default"].revision is None


def test_a_revision_in_lora_alone_is_refused(hub):
    with pytest.raises(OptionError, match="Give revision='dev'"):
        FineTuner(NAME, lora={"r": 2, "revision": "dev"}).configure_model()


def test_rows_are_compared_with_the_revision_that_was_loaded(hub, tmp_path):
    module = train(tmp_path)
    Path(hub / "refs" / "main").unlink()
    assert find_resized(module.model) == []
    base = AutoModelForCausalLM.from_pretrained(NAME, revision="dev")
    base.resize_token_embeddings(VOCABULARY + 8)
    given = FineTuner(base, lora={"r": 2, "revision": "dev"})
    given.configure_model()
    assert any("embed_tokens" in name for name in find_resized(given.model))
