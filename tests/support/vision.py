"""Tiny vision-language models with processors and rows of images, made without a hub."""

import io

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, ProcessorMixin
from transformers.processing_utils import ProcessingKwargs

from tests.packing.conftest import build_tokenizer
from tests.support.sizes import sizes

PLACEHOLDERS = {
    "qwen": "<|vision_start|><|image_pad|><|vision_end|>",
    "llava": "<image>",
    "mistral3": "[IMG]",
    "internvl": "<IMG_CONTEXT>",
    # Gemma 3 marks an image by the token before its tokens.
    "gemma3": "<start_of_image>",
    "gemma4": "<|image|>",
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}PLACEHOLDER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<img>", "</img>", "<IMG_CONTEXT>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<|image>", "<image|>", "<|image|>", "<|video|>"),
    "<|audio|>",
)
# Images of Gemma are longer than its windows here. What image tokens see in the last layer reaches no text.
GEMMA_LAYERS = ["sliding_attention", "full_attention", "full_attention"]
GEMMA_TEXT = {"sliding_window": 6, "layer_types": GEMMA_LAYERS, "num_hidden_layers": 3}
GEMMA_TOKENS = {
    "gemma3": {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
    "gemma4": {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
    },
}
TEXT = sizes(
    vocab=384,
    width=64,
    inner=48,
    layers=2,
    heads=4,
    key_heads=2,
    head_width=16,
    positions=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=0,
)
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
QWEN_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TOWER = sizes(width=32, inner=40, layers=2, heads=2, image_size=16, patch_size=4)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def family_of(name):
    return "qwen" if name.startswith("qwen") else name


def build_image_tokenizer(name):
    tokenizer = build_tokenizer(chat_template=TEMPLATE.replace("PLACEHOLDER", PLACEHOLDERS[family_of(name)]))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *SPECIAL]})
    if name == "internvl":
        tokenizer.start_image_token, tokenizer.end_image_token = "<img>", "</img>"
        tokenizer.context_image_token, tokenizer.video_token = "<IMG_CONTEXT>", "<|video_pad|>"
        for place in ("start_image_token", "end_image_token", "context_image_token"):
            setattr(tokenizer, f"{place}_id", tokenizer.convert_tokens_to_ids(getattr(tokenizer, place)))
    for place, token in GEMMA_TOKENS.get(name, {}).items():
        setattr(tokenizer, place, token)
        setattr(tokenizer, f"{place}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


def without_videos(processor_class):
    """The processor without its video part, which needs torchvision."""

    class ImagesAlone(processor_class):
        @classmethod
        def get_attributes(cls):
            return ["image_processor", "tokenizer", "video_processor"]

        def check_argument_for_proper_class(self, name, argument):
            return None if name == "video_processor" else super().check_argument_for_proper_class(name, argument)

    ImagesAlone.__name__ = processor_class.__name__
    return ImagesAlone


class PixtralLike(ProcessorMixin):
    """transformers' PixtralProcessor, whose module needs torchvision, with its tokens of rows and merged patches."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token = "[IMG]"
        self.image_token_id = tokenizer.convert_tokens_to_ids("[IMG]")

    def _process_images(self, images, **options):
        return super()._process_images(images, **{**options, "patch_size": 8})

    def replace_image_token(self, image_inputs, image_idx, **options):
        height, width = (int(size) // 8 for size in image_inputs["image_sizes"][image_idx])
        return "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"


class Gemma4Keywords(ProcessingKwargs, total=False):
    _defaults = {"text_kwargs": {"return_mm_token_type_ids": True}}


class Gemma4Like(ProcessorMixin):
    """transformers' Gemma4Processor, whose module needs torchvision in 5.17, without videos and sound."""

    valid_processor_kwargs = Gemma4Keywords
    unused_input_names = ("num_soft_tokens_per_image",)

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id

    def prepare_inputs_layout(self, images=None, text=None, **options):
        images, text, *others = super().prepare_inputs_layout(images=images, text=text, **options)
        return None if images is None else [images], text, *others

    def replace_image_token(self, image_inputs, image_idx, **options):
        num_tokens = image_inputs["num_soft_tokens_per_image"][image_idx]
        return f"{self.tokenizer.boi_token}{self.image_token * num_tokens}{self.tokenizer.eoi_token}"


def build_processor(name):
    import transformers

    tokenizer = build_image_tokenizer(name)
    template = tokenizer.chat_template
    if family_of(name) == "qwen":
        images = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
            patch_size=4,
            merge_size=2,
            temporal_patch_size=2,
            size={"shortest_edge": 64, "longest_edge": 1024},
        )
        processor_class = {
            "qwen2_vl": transformers.Qwen2VLProcessor,
            "qwen2_5_vl": transformers.Qwen2_5_VLProcessor,
        }.get(name, transformers.Qwen3VLProcessor)
        return without_videos(processor_class)(images, tokenizer, None, chat_template=template)
    if name == "llava":
        images = transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        )
        return transformers.LlavaProcessor(
            images,
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
            chat_template=template,
        )
    if name == "mistral3":
        images = transformers.models.pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil(
            size={"longest_edge": 32}, patch_size={"height": 4, "width": 4}
        )
        return PixtralLike(images, tokenizer, chat_template=template)
    if name == "gemma3":
        images = transformers.models.gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil(
            size={"height": 32, "width": 32}
        )
        return transformers.Gemma3Processor(images, tokenizer, chat_template=template, image_seq_length=16)
    if name == "gemma4":
        images = transformers.models.gemma4.image_processing_pil_gemma4.Gemma4ImageProcessorPil(
            patch_size=2, max_soft_tokens=70
        )
        return Gemma4Like(images, tokenizer, chat_template=template)
    images = transformers.models.got_ocr2.image_processing_pil_got_ocr2.GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=False
    )
    return without_videos(transformers.InternVLProcessor)(
        images, tokenizer, None, image_seq_length=4, chat_template=template
    )


def build_config(name, tokenizer):
    token = {"qwen": "<|image_pad|>", "llava": "<image>", "mistral3": "[IMG]", "internvl": "<IMG_CONTEXT>"}
    token |= {gemma: tokens["image_token"] for gemma, tokens in GEMMA_TOKENS.items()}
    image_token_id = tokenizer.convert_tokens_to_ids(token[family_of(name)])
    if name in ("qwen2_vl", "qwen2_5_vl"):
        tower = dict(QWEN_TOWER)
        if name == "qwen2_vl":
            tower = {**QWEN_TOWER, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 1}
        else:
            tower |= {"fullatt_block_indexes": [1], "window_size": 16}
        return AutoConfig.for_model(
            name, text_config={**TEXT, "rope_parameters": SECTIONS}, vision_config=tower, image_token_id=image_token_id
        )
    if name in ("qwen3_vl", "qwen3_vl_moe"):
        tower = {**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        text = {**TEXT, "rope_parameters": {**SECTIONS, "mrope_interleaved": True}}
        text |= EXPERTS if name.endswith("moe") else {}
        return AutoConfig.for_model(name, text_config=text, vision_config=tower, image_token_id=image_token_id)
    if name in ("qwen3_5", "qwen3_5_moe"):
        tower = {**QWEN_TOWER, "num_position_embeddings": 64, "deepstack_visual_indexes": []}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
        text = {
            **TEXT,
            **LINEAR,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": {**rope, "mrope_interleaved": True},
            **({**EXPERTS, "shared_expert_intermediate_size": 24} if name.endswith("moe") else {}),
        }
        return AutoConfig.for_model(name, text_config=text, vision_config=tower, image_token_id=image_token_id)
    if name == "llava":
        return AutoConfig.for_model(
            name,
            text_config={"model_type": "llama", **TEXT},
            vision_config={"model_type": "clip_vision_model", **TOWER},
            image_token_index=image_token_id,
            vision_feature_layer=-2,
            image_seq_length=16,
        )
    if name == "mistral3":
        return AutoConfig.for_model(
            name,
            text_config={"model_type": "mistral", **TEXT},
            vision_config={"model_type": "pixtral", **TOWER, "image_size": 32, "head_dim": 16},
            image_token_index=image_token_id,
            spatial_merge_size=2,
        )
    if name == "gemma3":
        return AutoConfig.for_model(
            name,
            text_config={**TEXT, **GEMMA_TEXT, "query_pre_attn_scalar": 16},
            vision_config={**TOWER, "image_size": 32, "vision_use_head": False},
            image_token_index=image_token_id,
            mm_tokens_per_image=16,
        )
    if name == "gemma4":
        text = {**TEXT, **GEMMA_TEXT, "global_head_dim": 16, "vocab_size_per_layer_input": 384}
        text |= {"hidden_size_per_layer_input": 8, "use_bidirectional_attention": "vision"}
        tower = {"patch_size": 2, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 128}
        return AutoConfig.for_model(
            name,
            text_config=text,
            vision_config={**TOWER, **tower},
            audio_config=None,
            image_token_id=image_token_id,
            video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
            audio_token_id=tokenizer.convert_tokens_to_ids("<|audio|>"),
        )
    return AutoConfig.for_model(
        "internvl",
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={"model_type": "internvl_vision", **TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=image_token_id,
        downsample_ratio=0.5,
    )


def build_vision_model(name, tokenizer):
    """A tiny model in float32 with weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(build_config(name, tokenizer), attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name or parameter.ndim > 1:
                parameter.normal_(std=0.15)
    return model


def make_image(seed, width, height):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def to_bytes(image):
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def make_rows():
    """Rows with 0, 1 and 2 images of different sizes, with their images in parts, and their PIL images."""
    images = [make_image(seed, *size) for seed, size in enumerate([(16, 16), (24, 16), (16, 32)])]
    rows = [
        chat(["two plus two"], "four"),
        chat([images[0], "what is it"], "the answer is four"),
        chat([images[1], "or", images[2], "is two"], "two"),
        chat(["what"], "is the answer", [images[1], "four"], "plus"),
    ]
    return rows, [[], [images[0]], [images[1], images[2]], [images[1]]]


def chat(*turns):
    """A row of messages; a list is a user's turn of texts and images, a string an answer."""
    messages = []
    for turn in turns:
        if isinstance(turn, str):
            messages.append({"role": "assistant", "content": turn})
        else:
            parts = [
                {"type": "text", "text": part}
                if isinstance(part, str)
                else {"type": "image", "image": {"bytes": to_bytes(part), "path": None}}
                for part in turn
            ]
            messages.append({"role": "user", "content": parts})
    return {"messages": messages}


def bare(row):
    """The messages of a row as a processor's chat template takes them: places of images without the images."""
    return [
        {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in row["messages"]
    ]
