"""Images through the three ways in: FineTuner, a LightningModule of the user, and the command line."""

import json
import shutil

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fastft.callbacks.fused_kernels import FusedKernels
from lightning_fastft.callbacks.gradient_health import GradientHealth
from lightning_fastft.cli.lightning_cli import FastFTCLI
from lightning_fastft.core.errors import DataError, NotTrainingError, OptionError, UnsupportedModelError
from lightning_fastft.hf.lora import add_adapters, parse_lora
from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.distillation import DistillationTuner
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.training_parts import PlainModule, quiet_data, quiet_trainer
from tests.support.two_ranks import run_two_ranks
from tests.support.vision import build_processor, build_vision_model, chat, make_image

register_strategies()

# The features are those of the layer before the last.
ADAPTED = r".*(language_model.*q_proj|vision_tower.*layers\.0.*out_proj)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of LLaVA as it is saved: model, tokenizer and processor."""
    path = tmp_path_factory.mktemp("llava")
    processor = build_processor("llava")
    processor.save_pretrained(path)
    build_vision_model("llava", processor.tokenizer).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of rows whose images lie beside it."""
    path = tmp_path_factory.mktemp("rows")
    lines = []
    for number in range(12):
        make_image(number, 16 + number, 24).save(path / f"{number}.png")
        parts = [{"type": "text", "text": "what is two"}]
        parts[:0] = [{"type": "image", "path": f"{number}.png"}] if number % 3 else []
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": f"the answer is {number}"}]
        lines.append(json.dumps({"messages": messages}))
    (path / "train.jsonl").write_text("\n".join(lines))
    return path / "train.jsonl"


def open_data(paths, **options):
    return quiet_data(paths, **{"max_tokens": 192, "num_workers": 0, **options})


def tuner_of(folder, **options):
    return FineTuner(str(folder), lora={"r": 2, **options}, learning_rate=1e-2, warmup_share=0.0, scheduler="constant")


def trained(module):
    return {name: tensor.clone() for name, tensor in module.named_parameters() if tensor.requires_grad}


@pytest.mark.filterwarnings("ignore:Resumed with another setting")
def test_a_folder_trains_on_rows_with_images_and_resumes_bit_for_bit(folder, rows, tmp_path):
    whole = tuner_of(folder, target_modules=ADAPTED)
    quiet_trainer(tmp_path / "whole", strategy="fastft", max_steps=3, callbacks=[GradientHealth(num_steps=3)]).fit(
        whole, open_data(str(rows))
    )
    first = tuner_of(folder, target_modules=ADAPTED)
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=1, save_top_k=-1)
    quiet_trainer(tmp_path / "first", strategy="fastft", max_steps=1, callbacks=[saver], enable_checkpointing=True).fit(
        first, open_data(str(rows))
    )
    second = tuner_of(folder, target_modules=ADAPTED)
    quiet_trainer(tmp_path / "second", strategy="fastft", max_steps=3).fit(
        second, open_data(str(rows), num_workers=1), ckpt_path=saver.best_model_path or saver.last_model_path
    )
    assert second.trainer.datamodule.plan.num_micro_batches > 1
    expected, found = trained(whole), trained(second)
    assert any("vision_tower" in name for name in expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(tensor, trained(first)[name]) for name, tensor in expected.items())


def test_default_adapters_leave_the_tower_out_and_health_is_content(folder, rows, tmp_path):
    tuner = tuner_of(folder)
    health = GradientHealth(num_steps=3)
    quiet_trainer(tmp_path, strategy="fastft", max_steps=3, callbacks=[health]).fit(tuner, open_data(str(rows)))
    assert not [name for name in trained(tuner) if "vision" in name or "projector" in name]
    assert "moved within 3 steps" in health.status().reason


def test_a_tower_alone_trains_on_packs_with_and_without_images(folder, tmp_path):
    words = "two plus two " * 3
    data = [chat([make_image(0, 16, 16), words] if number < 3 else [words * 2], "four") for number in range(6)]
    tuner = tuner_of(folder, target_modules=r".*vision_tower.*layers\.0.*out_proj")
    quiet_trainer(tmp_path, strategy="fastft", max_steps=6).fit(tuner, open_data(data, max_tokens=64))
    assert {batch.has_images for batch in tuner.trainer.datamodule.train_dataloader()} == {True, False}
    assert any(tensor.any() for name, tensor in trained(tuner).items() if "lora_B" in name)


def test_a_module_of_the_user_with_a_processor_trains(tmp_path):
    processor = build_processor("qwen2_5_vl")
    module = PlainModule(build_vision_model("qwen2_5_vl", processor.tokenizer))
    module.tokenizer, module.processor = processor.tokenizer, processor
    data = open_data([chat([make_image(number, 16, 16), "what"], "four") for number in range(6)])
    before = {name: tensor.clone() for name, tensor in module.named_parameters()}
    quiet_trainer(tmp_path, strategy="fastft", max_steps=2).fit(module, data)
    assert any("visual" in name and not torch.equal(tensor, before[name]) for name, tensor in module.named_parameters())


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_images_that_see_both_directions_train_in_fused_layers(name, tmp_path):
    processor = build_processor(name)
    module = PlainModule(build_vision_model(name, processor.tokenizer))
    module.tokenizer, module.processor = processor.tokenizer, processor
    rows = [chat([make_image(number, 16, 24), "what is two"], "four") for number in range(4)]
    health = GradientHealth(num_steps=3)
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=3, callbacks=[FusedKernels(), health])
    trainer.fit(module, open_data([*rows, chat(["two plus two"], "four")]))
    assert "moved within 3 steps" in health.status().reason
    assert [status.state for status in trainer.strategy.statuses() if status.name == "fused layers"] == ["active"]


def test_the_command_line_trains_on_images(folder, rows, tmp_path):
    words = ["--data.class_path", "lightning_fastft.PackedDataModule", "--data.init_args.paths", str(rows)]
    words += [
        "--data.init_args.cache_dir",
        "null",
        "--data.init_args.num_proc",
        "1",
        "--data.init_args.max_tokens",
        "192",
    ]
    words += ["--model.class_path", "lightning_fastft.FineTuner", "--model.init_args.model", str(folder)]
    words += ["--model.init_args.lora", '{"r": 2}', "--trainer.strategy", "fastft", "--trainer.accelerator", "cpu"]
    words += ["--trainer.max_steps", "1", "--trainer.logger", "false", "--trainer.default_root_dir", str(tmp_path)]
    run = FastFTCLI(["fit", *words])
    assert run.trainer.global_step == 1


class TowerModule(PlainModule):
    """LLaVA with adapters in its language model and its tower."""

    def __init__(self, *, detaches=False):
        processor = build_processor("llava")
        model = build_vision_model("llava", processor.tokenizer)
        lora = {"r": 2, "target_modules": ["q_proj", "out_proj"], "exclude_modules": r".*encoder\.layers\.1\..*"}
        super().__init__(add_adapters(model, lora=parse_lora(lora), adapter_dtype=torch.float32))
        self.processor, self.tokenizer = processor, processor.tokenizer
        if detaches:
            projector = model.model.multi_modal_projector
            projector.register_forward_hook(lambda module, args, output: output.detach())


def fit_tower(tmp_path, data, *, detaches=False):
    health = GradientHealth(num_steps=3)
    trainer = quiet_trainer(tmp_path, strategy="fastft", max_steps=4, max_epochs=4, callbacks=[health])
    trainer.fit(TowerModule(detaches=detaches), open_data(data))
    return health


def test_a_tower_without_images_is_not_judged_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="tensors of image towers were not checked: 0 steps had images"):
        health = fit_tower(tmp_path, [chat(["what"], "four")])
    assert "of image towers wait for images" in health.status().reason


def test_a_tower_with_images_is_judged(tmp_path):
    data = [chat([make_image(0, 16, 16), "what"], "four")]
    assert "moved within 3 steps" in fit_tower(tmp_path, data).status().reason
    with pytest.raises(NotTrainingError, match="vision_tower"):
        fit_tower(tmp_path, data, detaches=True)


def test_images_of_a_family_that_is_not_served_stop_before_the_first_step(tmp_path):
    processor = build_processor("llava")
    module = PlainModule(build_vision_model("llava", processor.tokenizer))
    module.model.config.model_type = "idefics3"
    module.processor, module.tokenizer = processor, processor.tokenizer
    with pytest.raises(UnsupportedModelError, match="idefics3"):
        quiet_trainer(tmp_path, strategy="fastft", max_steps=1).fit(
            module, open_data([chat([make_image(0, 16, 16), "what"], "four")])
        )


def test_a_store_of_a_teacher_knows_the_processor_of_its_images(folder, rows, tmp_path):
    """Other pixels make as many tokens, so that the data looks the same."""
    other = shutil.copytree(folder, tmp_path / "other")
    (file,) = (path for path in other.glob("*processor_config.json") if "image_mean" in path.read_text())
    content = json.loads(file.read_text())
    content.get("image_processor", content)["image_mean"] = [0.1, 0.2, 0.3]
    file.write_text(json.dumps(content))

    def fit(student):
        tuner = DistillationTuner(
            str(student), teacher=str(folder), lora={"r": 2}, store=str(tmp_path / "store"), top_k=8, learning_rate=1e-2
        )
        quiet_trainer(tmp_path / "run", strategy="fastft", max_steps=1).fit(tuner, open_data(str(rows)))

    fit(folder)
    fit(folder)
    with pytest.raises(DataError, match="the processor of images has changed since it was written"):
        fit(other)


def test_positions_without_a_model_are_asked_for():
    data = open_data([chat([make_image(0, 16, 16), "what"], "four")], tokenizer=build_processor("qwen2_5_vl"))
    data.setup("fit")
    with pytest.raises(OptionError, match="Positions of images"):
        next(iter(data.train_dataloader()))


@pytest.mark.slow(seconds=5)
def test_a_tower_trains_on_ranks_with_and_without_images(tmp_path):
    run_two_ranks("tests.training.images_worker", tmp_path, "tower")
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    pairs = set(zip(first["has_images"], second["has_images"]))
    assert {(True, False), (False, True)} & pairs
    assert all(torch.equal(tensor, second["trained"][name]) for name, tensor in first["trained"].items())
    assert any(
        "vision_tower" in name and "lora_B" in name and tensor.any() for name, tensor in first["trained"].items()
    )


@pytest.mark.slow(seconds=10)
def test_every_weight_trains_sharded_with_images_on_one_rank_as_under_ddp(tmp_path):
    found = {}
    for strategy in ("fastft_ddp", "fastft_fsdp"):
        folder = tmp_path / strategy
        processor = build_processor("qwen3_vl")
        processor.tokenizer.save_pretrained(folder)
        build_vision_model("qwen3_vl", processor.tokenizer).save_pretrained(folder)
        run_two_ranks("tests.training.images_worker", folder, strategy)
        found[strategy] = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    first, second = found["fastft_fsdp"]
    # An image on one rank alone, and a step after it that shows what it trained.
    assert any(one != other for one, other in zip(first["has_images"][:-1], second["has_images"][:-1]))
    for ours, theirs in zip(found["fastft_fsdp"], found["fastft_ddp"]):
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-4)
