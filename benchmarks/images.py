r"""LoRA on a vision-language model with images: tokens per second, time and memory, compared with TRL.

    python -m benchmarks.images build --root /dev/shm/fastft
    python -m benchmarks.images run --root /dev/shm/fastft --out runs/images \
        --arms ours:keep+fused ours:recompute+fused trl:8 trl:8+recompute trl:16+recompute

The model has the configuration of Qwen3-VL-8B and random weights; adapters are on the language model, the image tower
is frozen. A row is a question with one image of noise (448 x 448 to 960 x 640 pixels, 196 to 600 tokens) and an answer
of mean 128 words. Ours trains one pack in a step. TRL, which cannot pack images, trains N rows in a step (``trl:N``).
Tokens are those of rows, with images and without padding. Both read the same files, and start from the
same adapters; check is the mean loss of the same first 8 rows. An arm is one process; 4 warm-up steps, then 20.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tuners import LEARNING_RATE, NUM_CHECKED, NUM_TIMED, StepClock, print_record, run_arms

NUM_ROWS, NUM_WORDS, NUM_QUESTION_WORDS, MEAN_ANSWER = 400, 8000, 24, 128
SIZES = ((448, 448), (640, 448), (640, 640), (960, 640))
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|> {{ message.role }} {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %} {{ part.text }}{% endif %}{% endfor %}{% endif %}"
    " <|im_end|> {% endfor %}{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
# An adapter's B has the size that it has after some hundred steps, so that A has a gradient.
ADAPTER_STD = 0.01


class Workload(NamedTuple):
    """A model by its configuration, and its packs.

    Args:
        text: Configuration of the language model.
        tower: Configuration of the image tower.
        max_tokens: Tokens of a pack.
        divisor: Divisor of the sides of images and the lengths of answers.
    """

    text: dict[str, Any]
    tower: dict[str, Any]
    max_tokens: int = 8192
    divisor: int = 1


_ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True}
WORKLOADS = {
    "qwen3-vl-8b": Workload(
        {
            "vocab_size": 151_936,
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262_144,
            "rope_parameters": {**_ROPE, "mrope_section": [24, 20, 20]},
        },
        {
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
    ),
    "tiny": Workload(
        {
            "vocab_size": 8100,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]},
        },
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        max_tokens=256,
        divisor=16,
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "build":
        return _build(options)
    if options.command == "run":
        arm_options = ("--workload", options.workload)
        return run_arms(options, benchmark="images", arm_options=arm_options, workload=options.workload)
    system, _, mode = options.arm.partition(":")
    run = {"ours": _run_ours, "trl": _run_trl}[system]
    print_record(run(options, mode=mode), is_cuda=options.device == "cuda")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("build", "run", "arm"):
        command = commands.add_parser(name)
        command.add_argument("--workload", default="qwen3-vl-8b", choices=tuple(WORKLOADS))
        command.add_argument("--root", type=Path, required=True)
        command.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
        if name != "build":
            command.add_argument("--steps", type=int, default=NUM_TIMED)
            command.add_argument("--out", type=Path, required=True)
        if name == "run":
            command.add_argument("--arms", nargs="+", required=True)
            command.add_argument("--arm-s", type=float, default=300.0)
        if name == "arm":
            command.add_argument("--arm", required=True)
    return parser


def _folder(options: argparse.Namespace) -> Path:
    folder: Path = options.root / f"images-{options.workload}"
    return folder


def _build(options: argparse.Namespace) -> int:
    """Write model, images and rows."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    workload, folder = WORKLOADS[options.workload], _folder(options)
    tokenizer = make_processor(workload).tokenizer
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config={**workload.text, "pad_token_id": 0, "eos_token_id": 2},
        vision_config=workload.tower,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")},
        **{
            f"vision_{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|vision_{name}|>")
            for name in ("start", "end")
        },
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    is_cuda = options.device == "cuda"
    with torch.device(options.device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16 if is_cuda else torch.float32)
    model.save_pretrained(folder / "model")
    write_rows(folder, divisor=workload.divisor)
    return 0


def make_processor(workload: Workload) -> Any:
    """Return the processor of Qwen3-VL over a tokenizer of words, without its part for videos."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    class ImagesAlone(Qwen3VLProcessor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer", "video_processor"]

        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)

    ImagesAlone.__name__ = Qwen3VLProcessor.__name__
    names = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", *(f"w{number}" for number in range(NUM_WORDS))]
    words = Tokenizer(models.WordLevel({name: place for place, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="<|im_end|>", unk_token="<unk>",
        model_max_length=32_768,
    )  # fmt: skip
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    tower = workload.tower
    side = tower["patch_size"] * tower["spatial_merge_size"]
    images = Qwen2VLImageProcessorPil(
        patch_size=tower["patch_size"],
        merge_size=tower["spatial_merge_size"],
        temporal_patch_size=tower["temporal_patch_size"],
        size={"shortest_edge": side**2, "longest_edge": 4096 * side**2},
    )
    return ImagesAlone(images, tokenizer, None, chat_template=TEMPLATE)


def write_rows(folder: Path, *, divisor: int) -> None:
    """Write seeded rows with an image each."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"w{number}" for number in draws.integers(0, NUM_WORDS, max(2, count)))

    lines = []
    for number in range(NUM_ROWS):
        width, height = (side // divisor for side in SIZES[number % len(SIZES)])
        pixels = draws.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=0)
        length = int(np.clip(draws.lognormal(np.log(MEAN_ANSWER) - 0.18, 0.6), 16, 4 * MEAN_ANSWER)) // divisor
        question = [
            {"type": "image", "path": f"{number}.png"},
            {"type": "text", "text": words(NUM_QUESTION_WORDS // divisor)},
        ]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": words(length)}]
        lines.append(json.dumps({"messages": messages}))
    for name, chosen in (("train", lines), ("first", lines[:NUM_CHECKED])):
        (folder / f"{name}.jsonl").write_text("\n".join(chosen) + "\n")


def _lora() -> Any:
    from peft import LoraConfig

    projections = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"
    return LoraConfig(r=16, lora_alpha=16, target_modules=rf".*language_model.*\.({projections})")


def _start(model: Any) -> None:
    """Give every adapter the same seeded B in every system, independent of the order of its adapters."""
    import zlib

    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                place = name[name.index("layers.") :]
                generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
                std = ADAPTER_STD if "lora_B" in name else parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


def _run_ours(options: argparse.Namespace, *, mode: str) -> dict[str, Any]:
    import torch
    from lightning.pytorch import Callback

    import lightning_fastft
    from benchmarks.ruler.plans import parse_mode
    from lightning_fastft import FineTuner, PackedDataModule

    is_cuda, workload, folder = options.device == "cuda", WORKLOADS[options.workload], _folder(options)
    plan = parse_mode(mode)
    tuner = FineTuner(
        str(folder / "model"), tokenizer=make_processor(workload), lora=_lora(), learning_rate=LEARNING_RATE,
        dtype="bfloat16" if is_cuda else "float32",
    )  # fmt: skip
    data = {"max_tokens": workload.max_tokens, "cache_dir": None, "show_progress": False}
    clock = StepClock(num_steps=options.steps, is_cuda=is_cuda)
    num_tokens: list[int] = []

    class Measure(Callback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            _start(pl_module.model)
            if pl_module.low_precision_adapters is not None:
                pl_module.low_precision_adapters.refresh()

        on_train_start = on_validation_start

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            clock.note_gradients(pl_module.parameters())

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            num_tokens.append(batch.context.num_real_tokens)
            trainer.should_stop = clock.step_done(batch.context.num_documents) or trainer.should_stop

    first = PackedDataModule(None, val_paths=str(folder / "first.jsonl"), **data)
    checked = plan.make_trainer(Measure(), is_cuda=is_cuda).validate(tuner, first, verbose=False)[0]["val_loss"]
    train = PackedDataModule(str(folder / "train.jsonl"), **data)
    plan.make_trainer(Measure(), is_cuda=is_cuda, max_steps=clock.num_total).fit(tuner, train)
    torch.cuda.empty_cache() if is_cuda else None
    return _record(clock, num_tokens, check=checked, version=lightning_fastft.__version__)


def _run_trl(options: argparse.Namespace, *, mode: str) -> dict[str, Any]:
    import torch
    import trl
    from datasets import Dataset, Image
    from peft import get_peft_model
    from transformers import AutoModelForImageTextToText, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    is_cuda, workload, folder = options.device == "cuda", WORKLOADS[options.workload], _folder(options)
    batch_size, _, rest = mode.partition("+")
    model = AutoModelForImageTextToText.from_pretrained(
        folder / "model", dtype=torch.bfloat16 if is_cuda else torch.float32, device_map={"": options.device},
        attn_implementation="flash_attention_2" if is_cuda else "sdpa",
    )  # fmt: skip
    model = get_peft_model(model, _lora())
    _start(model)
    clock = StepClock(num_steps=options.steps, is_cuda=is_cuda)

    def read(name: str) -> Any:
        rows = []
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            question, answer = json.loads(line)["messages"]
            image, text = question["content"]
            content = [{"type": "image", "text": None}, {"type": "text", "text": text["text"]}]
            rows.append(
                {
                    "images": [str(folder / image["path"])],
                    "prompt": [{"role": "user", "content": content}],
                    "completion": [{"role": "assistant", "content": [{"type": "text", "text": answer["content"]}]}],
                }
            )
        return Dataset.from_list(rows).cast_column("images", [Image()])

    trainer = SFTTrainer(
        model=model,
        processing_class=make_processor(workload),
        train_dataset=read("train"),
        eval_dataset=read("first"),
        args=SFTConfig(
            output_dir=str(folder / "trainer_output"), per_device_train_batch_size=int(batch_size),
            per_device_eval_batch_size=NUM_CHECKED, max_steps=clock.num_total, learning_rate=LEARNING_RATE,
            max_grad_norm=1e9, logging_steps=100_000, save_strategy="no", report_to="none", disable_tqdm=True,
            bf16=is_cuda, gradient_checkpointing=rest == "recompute", max_length=None,
            optim="adamw_torch_fused" if is_cuda else "adamw_torch", dataloader_num_workers=8 if is_cuda else 0,
            **({} if is_cuda else {"use_cpu": True}),
        ),
    )  # fmt: skip
    num_tokens: list[int] = []
    own_step = trainer.training_step

    def training_step(model: Any, inputs: Any, *more: Any, **others: Any) -> Any:
        num_tokens.append(inputs["attention_mask"].sum())
        return own_step(model, inputs, *more, **others)

    class Measure(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.note_gradients(trainer.model.parameters())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.step_done(int(batch_size))

    checked = trainer.evaluate()["eval_loss"]
    trainer.training_step = training_step
    trainer.add_callback(Measure())
    trainer.train()
    return _record(clock, [int(count) for count in num_tokens], check=checked, version=f"trl {trl.__version__}")


def _record(clock: StepClock, num_tokens: list[int], *, check: float, version: str) -> dict[str, Any]:
    measured = clock.record()
    timed = num_tokens[-clock.num_timed :]
    seconds = measured["step_ms"] * len(timed) / 1e3
    return {**measured, "tokens_per_s": sum(timed) / seconds, "check": float(check), "version": version}


if __name__ == "__main__":
    sys.exit(main())
