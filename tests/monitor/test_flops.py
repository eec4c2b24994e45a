"""count_flops: what torch's own counter sees, for full, frozen and adapted models, dense and with experts."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lightning_fastft.hf.families import decoder_layers, find_causal_models
from lightning_fastft.monitor.flops import count_flops
from tests.support.sizes import sizes
from tests.support.tiny_models import build_tiny

NUM_TOKENS = 64


def tiny_llama():
    return LlamaForCausalLM(
        LlamaConfig(
            **sizes(vocab=96, width=32, inner=64, layers=3, heads=4, key_heads=2),
            attn_implementation="eager",
            tie_word_embeddings=False,
        )
    )


def ours(root, *, num_labelled=NUM_TOKENS, sum_squared=NUM_TOKENS**2):
    ((_, model),) = find_causal_models(root)
    return count_flops(model, decoder_layers(model)).step_flops(
        num_tokens=NUM_TOKENS, num_labelled=num_labelled, sum_squared_lengths=sum_squared
    )


def seen_by_torch(model):
    ids = torch.randint(0, 96, (1, NUM_TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return counter.get_total_flops()


# Eager attention computes the masked half too; rotary angles are a small product; the head's last row has no label.
def dense_attention_excess(model):
    config = model.config
    width = config.num_attention_heads * 2 * config.head_dim
    return config.num_hidden_layers * 2 * width * NUM_TOKENS**2 / 2 * 3


def test_full_training_agrees_with_torch():
    model = tiny_llama()
    expected = seen_by_torch(model) - dense_attention_excess(model)
    assert ours(model) == pytest.approx(expected, rel=0.01)


def test_lora_costs_no_weight_gradient_of_the_base():
    model = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules="all-linear"))
    expected = seen_by_torch(model) - dense_attention_excess(model)
    # Gradients do not pass below the first layer's projections, which is counted as if they did.
    first_layer = model.get_base_model().model.layers[0].self_attn
    not_needed = (
        2 * NUM_TOKENS * sum(p.weight.numel() for p in (first_layer.q_proj, first_layer.k_proj, first_layer.v_proj))
    )
    assert ours(model) == pytest.approx(expected + not_needed, rel=0.01)


def test_layers_below_the_lowest_trained_weight_have_no_backward():
    model = tiny_llama().requires_grad_(False)
    model.model.layers[2].requires_grad_(True)
    flops = count_flops(model, decoder_layers(model))
    assert [layer.has_backward for layer in flops.layers] == [False, False, True]
    everything = ours(tiny_llama())
    assert ours(model) < 0.6 * everything


def test_head_is_counted_on_labelled_tokens_only():
    model = tiny_llama()
    head = 3 * 2 * model.lm_head.weight.numel()
    assert ours(model, num_labelled=64) - ours(model, num_labelled=14) == pytest.approx(50 * head)


def test_attention_follows_the_documents_and_the_window():
    model = tiny_llama()
    per_pair = ours(model, sum_squared=2) - ours(model, sum_squared=0)
    assert per_pair == pytest.approx(3 * 2 * 3 * 4 * 16)
    model.config.sliding_window = 8
    assert ours(model) < ours(tiny_llama())


def test_only_layers_with_softmax_attention_count_pairs_of_tokens():
    model = build_tiny("qwen3_next")
    config = model.config
    num_softmax = config.layer_types.count("full_attention")
    assert 0 < num_softmax < config.num_hidden_layers
    per_pair = ours(model, sum_squared=2) - ours(model, sum_squared=0)
    assert per_pair == pytest.approx(3 * 2 * num_softmax * config.num_attention_heads * 2 * config.head_dim)


def test_a_model_without_attention_heads_is_counted():
    model = Mamba2ForCausalLM(
        Mamba2Config(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=1)
    )
    assert ours(model, sum_squared=NUM_TOKENS**2) == ours(model, sum_squared=0) > 0


@pytest.mark.parametrize("num_active", [1, 2])
def test_experts_count_by_the_share_a_token_meets(num_active):
    config = Qwen3MoeConfig(
        **sizes(vocab=96, width=32, inner=64, layers=1, heads=4, key_heads=2, head_width=8),
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=num_active,
    )
    layer = count_flops(model := Qwen3MoeForCausalLM(config), decoder_layers(model)).layers[0]
    attention = 32 * 32 + 2 * 32 * 16 + 32 * 32
    assert layer.num_active_weights == attention + 32 * 8 + num_active * 3 * 32 * 16


def test_quantised_weights_count_by_their_features():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny_llama().requires_grad_(False)
    before = count_flops(model, decoder_layers(model)).layers[1].num_active_weights
    old = model.model.layers[1].mlp.down_proj
    new = bitsandbytes.nn.Linear4bit(old.in_features, old.out_features, bias=False, quant_type="nf4")
    new.weight = bitsandbytes.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
    model.model.layers[1].mlp.down_proj = new.to("cpu")
    assert count_flops(model, decoder_layers(model)).layers[1].num_active_weights == before
