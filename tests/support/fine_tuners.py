"""FineTuners of a tiny model in each mode of training, a short fit, and a tokenizer of words."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_fastft.strategies.registry import register_strategies
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.sizes import tiny_qwen3
from tests.support.training_parts import VOCAB_SIZE, packed_loader, quiet_trainer

register_strategies()


CONFIG = tiny_qwen3(vocab=VOCAB_SIZE, width=64, inner=96, tie_word_embeddings=True, eos_token_id=2)
LORA = {"r": 4, "lora_alpha": 8}
MODES = {
    "full": {"dtype": "float32"},
    "lora": {"dtype": "float32", "lora": LORA},
    "lora_bf16": {"dtype": "bfloat16", "lora": LORA},
    "qlora": {"dtype": "bfloat16", "lora": LORA, "quantization": "nf4"},
}


def tuner(mode="lora", **options):
    return FineTuner(CONFIG, init="random", **{"learning_rate": 1e-2, **MODES[mode], **options})


def trainable(module):
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def fit(module, tmp_path, *, num_batches=4, **options):
    trainer = quiet_trainer(tmp_path, **{"strategy": "fastft", **options})
    trainer.fit(module, packed_loader(num_batches))
    return trainer


def word_tokenizer(template=False):
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"w{index}": index for index in range(3, VOCAB_SIZE)}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>")
    if template:
        tokenizer.chat_template = (
            "{% for m in messages %}{{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
        )
    return tokenizer
