"""Initialisations that move a part of the base into the adapters: training starts from the base, and files fit it."""

import pytest
import torch
from lightning.pytorch import seed_everything
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.core.errors import OptionError
from lightning_fastft.training.fine_tuner import FineTuner
from tests.support.fine_tuners import CONFIG
from tests.support.packs import assert_close
from tests.support.training_parts import VOCAB_SIZE

UNTIED = {**CONFIG, "tie_word_embeddings": False}
# Its linear layers are Conv1D, whose weights have swapped axes; two of them are square.
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": VOCAB_SIZE,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Its two hybrid layers share one block of attention.
ZAMBA2 = {
    "model_type": "zamba2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "num_mem_blocks": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "mamba_d_state": 8,
    "n_mamba_heads": 4,
    "mamba_ngroups": 1,
}


@pytest.fixture
def make(tmp_path):
    """Returns a base and a tuner of it, whose adapters were changed as by a training."""

    def make_both(config, **lora):
        seed_everything(3, verbose=False)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(tmp_path / "base")
        module = FineTuner(str(tmp_path / "base"), tokenizer=None, dtype="float32", lora={"r": 4, **lora})
        module.configure_model()
        return open_base(tmp_path), module

    return make_both


def open_base(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, attn_implementation="eager")


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


def train(module):
    for parameter in module.model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape)


@pytest.mark.parametrize("initialisation", ["pissa", "olora"])
def test_adapters_of_embeddings_are_read_back_with_those_of_linear_layers(make, tmp_path, initialisation):
    targets = ["q_proj", "down_proj", "embed_tokens"]
    base, module = make(UNTIED, init_lora_weights=initialisation, target_modules=targets)
    assert_close(logits(module.model), logits(base))
    train(module)
    trained = logits(module.model)
    module.save_pretrained(str(tmp_path / "out"))
    assert_close(logits(PeftModel.from_pretrained(open_base(tmp_path), str(tmp_path / "out"))), trained)
    module.to_plain_lora()
    assert_close(logits(module.model), trained)


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("targets", [["c_proj"], ["c_attn", "c_fc", "c_proj", "wte"]])
def test_a_base_whose_axes_are_swapped_is_restored(make, targets):
    base, module = make(GPT2, init_lora_weights="pissa", target_modules=targets)
    assert_close(logits(module.model), logits(base))
    train(module)
    trained = logits(module.model)
    module.to_plain_lora()
    assert_close(logits(module.model), trained)
    restored = module.model.unload()
    for name, parameter in base.named_parameters():
        assert_close(restored.get_parameter(name).detach(), parameter.detach())


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to:UserWarning")
@pytest.mark.parametrize(
    ("config", "lora", "message"),
    [
        # The embedding would lose what the adapter of the head takes.
        (CONFIG, {"init_lora_weights": "pissa", "target_modules": ["lm_head"]}, "model.embed_tokens has the same"),
        (GPT2, {"init_lora_weights": "pissa", "target_modules": ["lm_head"]}, "transformer.wte has the same"),
        # Each of the two adapters would take its part.
        (ZAMBA2, {"init_lora_weights": "olora", "target_modules": ["q_proj"]}, "q_proj has the same"),
        # PEFT decomposes the weight as it is, and the layer multiplies with its transpose.
        (GPT2, {"init_lora_weights": "olora", "target_modules": ["c_proj"]}, "Conv1D.*'pissa'"),
    ],
)
def test_a_change_that_another_layer_would_see_is_refused(make, config, lora, message):
    with pytest.raises(OptionError, match=message):
        make(config, **lora)
