import copy
import functools
import importlib.metadata

import pytest
import torch
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from lightning_fastft.core.errors import BackendError, ShapeError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.hf.families import FAMILIES
from lightning_fastft.packing.context import BatchContext
from lightning_fastft.patches.attention import attend, defer_mask, install_attention, register
from lightning_fastft.patches.deferred_mask import DeferredMask
from tests.support.packs import (
    LENGTHS,
    assert_close,
    make_batch,
    make_documents,
    relative_error,
    run_one_by_one,
    run_packed,
    take_gradients,
)
from tests.support.sizes import sizes
from tests.support.tiny_models import DENSE, MOE, TINY, VOCABULARY, WINDOW, build_tiny

pytestmark = pytest.mark.covering

CPU_BACKENDS = ("sdpa", "reference")


def claims(name, backend):
    return backend in FAMILIES[TINY[name][0]]


def install(model):
    patcher = ModelPatcher()
    install_attention(model, patcher)
    return patcher


@functools.cache
def eager_truth(name):
    """Loss, logits and gradients of transformers' own eager attention, one document at a time."""
    model = build_tiny(name)
    batch = make_batch()
    loss, logits = run_one_by_one(model, make_documents(), num_items=batch.context.num_items)
    return loss, logits, take_gradients(model)


@pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name in TINY for backend in CPU_BACKENDS if claims(name, backend)]
)
def test_packed_documents_equal_one_by_one(name, backend):
    model = build_tiny(name)
    install(model)
    batch = make_batch(backend=backend, pad_to=40)
    loss, logits = run_packed(model, batch)
    true_loss, true_logits, true_gradients = eager_truth(name)
    assert batch.context.reads == {backend: 2}
    assert_close(loss, true_loss)
    assert_close(logits[: sum(LENGTHS)], true_logits)
    assert_close(take_gradients(model), true_gradients)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", [name for name in TINY if claims(name, "flex")])
def test_flex_forward_equals_one_by_one(name):
    model = build_tiny(name)
    install(model)
    batch = make_batch(backend="flex")
    with torch.no_grad():
        logits = model(**batch).logits[0]
    assert batch.context.reads == {"flex": 2}
    assert_close(logits, eager_truth(name)[1])


def test_flex_on_a_cpu_refuses_gradients_and_names_those_that_can():
    model = build_tiny("llama")
    install(model)
    with pytest.raises(BackendError, match=r"'flex' has no backward on a CPU.*'sdpa', 'reference'"):
        model(**make_batch(backend="flex"))


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_checkpointing_gives_the_same_gradients_and_builds_each_mask_once(name):
    model = build_tiny(name).train()
    install(model)
    checkpoint = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)
    batch = make_batch()
    run_packed(model, batch)
    assert_close(take_gradients(model), eager_truth(name)[2])
    assert batch.context.num_reads == 4  # two layers, each run again in the backward
    assert batch.context.num_builds == {"dense_mask": len({layer_window(layer) for layer in model.model.layers})}


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_adapters_leave_packed_attention_exact(name):
    from peft import LoraConfig, get_peft_model

    def adapted():
        torch.manual_seed(1)
        return get_peft_model(
            build_tiny(name),
            LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_dropout=0.0),
        )

    reference = adapted()
    true_loss, true_logits = run_one_by_one(reference, make_documents(), num_items=make_batch().context.num_items)
    model = adapted()
    install(model.get_base_model())
    loss, logits = run_packed(model, make_batch())
    assert_close(loss, true_loss)
    assert_close(logits, true_logits)
    gradients = take_gradients(model)
    assert len(gradients) == 8
    assert_close(gradients, take_gradients(reference))


def layer_window(layer):
    """The window that one decoder layer's attention passes on, as the batch context keeps it."""
    window = getattr(layer.self_attn, "sliding_window", None)
    return window if window is not None and window < max(LENGTHS) else None


@pytest.mark.parametrize("name", list(TINY))
def test_each_distinct_window_builds_one_mask_per_batch(name):
    model = build_tiny(name)
    install(model)
    num_windows = len(set(TINY[name][1].get("layer_types", ["full_attention"])))
    for seed in range(2):
        batch = make_batch(seed=seed)
        run_packed(model, batch)
        assert batch.context.num_builds == {"dense_mask": num_windows}


def count_dispatched(lengths):
    """Operations that the masks and offsets of a pack take."""
    from torch.utils._python_dispatch import TorchDispatchMode

    called = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    context = make_batch(lengths).context
    with Recorder():
        context.dense_mask(window=2)
        context.block_mask(window=2)
        context.varlen()
    return len(called)


def test_metadata_is_built_without_a_loop_over_documents():
    assert count_dispatched((3,) * 40) == count_dispatched((60, 60))


def embedding_gradients(model, batch, embeddings):
    """Gradients with respect to the input embeddings, and what every router chose."""
    chosen = []
    hooks = [
        module.register_forward_hook(lambda module, inputs, output: chosen.append(output))
        for path, module in model.named_modules()
        if path.endswith(("mlp.gate", "mlp.router"))
    ]
    embeddings = embeddings.detach().requires_grad_()
    arguments = {key: batch[key] for key in batch.keys() if key != "input_ids"}  # noqa: SIM118 - a PackedBatch iterates over its weight
    if model.config.model_type == "gemma4_text":
        # It would look tokens up by their embeddings.
        arguments["per_layer_inputs"] = model.get_decoder().get_per_layer_inputs(batch["input_ids"], None).detach()
    model(inputs_embeds=embeddings, **arguments).loss.backward()
    for hook in hooks:
        hook.remove()
    model.zero_grad(set_to_none=True)
    return embeddings.grad[0], chosen


def top_indices(routed):
    """Indices of the chosen experts; a router returns them beside its scores, or scores from which the model
    takes the largest.
    """
    tensors = [t for output in routed for t in (output if isinstance(output, tuple) else (output,))]
    return [t if not t.is_floating_point() else t.topk(2, dim=-1).indices for t in tensors]


@pytest.mark.parametrize(
    ("name", "backend"), [(name, backend) for name in DENSE for backend in CPU_BACKENDS if claims(name, backend)]
)
def test_a_perturbed_document_changes_no_gradient_of_the_others(name, backend):
    model = build_tiny(name)
    install(model)
    first, second = make_batch(seed=0, backend=backend), make_batch(seed=0, backend=backend)
    rows = slice(LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3]))
    embeddings = model.get_input_embeddings()(first["input_ids"]).detach()
    changed = embeddings.clone()
    changed[0, rows] = torch.randn_like(changed[0, rows]) * 3
    before, _ = embedding_gradients(model, first, embeddings)
    after, _ = embedding_gradients(model, second, changed)
    difference = (after - before).abs()
    assert difference[rows].max() > 1e-4
    difference[rows] = 0
    assert difference.max() == 0


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("keeps_routing", [True, False])
def test_a_perturbed_document_in_a_mixture_of_experts(name, experts, keeps_routing):
    """Exactly 0 while every token keeps its experts; else other documents' rows sit in matrices of other sizes,
    and only rounding may differ.
    """
    model = build_tiny(name, experts=experts)
    install(model)
    rows = slice(LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3]))
    batch = make_batch()
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach()
    changed = embeddings.clone()
    changed[0, rows] += torch.randn_like(changed[0, rows]) * (1e-4 if keeps_routing else 3)
    before, routed_before = embedding_gradients(model, batch, embeddings)
    after, routed_after = embedding_gradients(model, make_batch(), changed)
    same_routing = all(torch.equal(a, b) for a, b in zip(top_indices(routed_before), top_indices(routed_after)))
    assert same_routing == keeps_routing
    difference = (after - before).abs()
    assert difference[rows].max() > 1e-7
    difference[rows] = 0
    assert difference.max() <= (0 if keeps_routing else 1e-5 * before.abs().max())


# Without a context


def padded_inputs(*, side, lengths=(9, 4, 7)):
    torch.manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)))
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, slice(-length, None) if side == "left" else slice(0, length)] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("name", list(TINY))
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_without_context_equals_eager_attention(name, side, use_cache):
    eager, ours = build_tiny(name), build_tiny(name)
    install(ours)
    inputs = padded_inputs(side=side)
    expected, given = (model(**inputs, use_cache=use_cache) for model in (eager, ours))
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(given.logits[seen], expected.logits[seen], atol=1e-5, rtol=1e-5)
    for model, output in ((eager, expected), (ours, given)):
        output.logits[seen].square().mean().backward()
        assert model.get_input_embeddings().weight.grad is not None
    assert_close(take_gradients(ours), take_gradients(eager))
    if not use_cache:
        return
    # One more token, read from the cache.
    step = torch.full((3, 1), 11)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 1, dtype=torch.long)], dim=1)
    expected, given = (
        model(input_ids=step, attention_mask=mask, past_key_values=output.past_key_values).logits
        for model, output in ((eager, expected), (ours, given))
    )
    torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", list(TINY))
def test_generates_the_tokens_of_eager_attention(name):
    inputs = padded_inputs(side="left")
    eager, ours = build_tiny(name).eval(), build_tiny(name).eval()
    install(ours)
    arguments = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected, given = (model.generate(**inputs, **arguments) for model in (eager, ours))
    assert given.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_generates_with_a_static_cache(name):
    inputs = padded_inputs(side="left")
    model = build_tiny(name).eval()
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)
    install(model)
    given = model.generate(
        **inputs,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        cache_implementation="static",
        disable_compile=True,
    )
    assert given.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_takes_ready_masks_and_none(name):
    eager, ours = build_tiny(name), build_tiny(name)
    install(ours)
    ids = padded_inputs(side="right")["input_ids"]
    seen = torch.ones(9, 9).tril().bool() & (torch.rand(9, 9) > 0.3) | torch.eye(9).bool()
    additive = torch.zeros(9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    layer, other = eager.model.layers[0].self_attn, ours.model.layers[0].self_attn
    hidden, rotary = (
        torch.randn(3, 9, 32),
        eager.model.rotary_emb(torch.randn(1), torch.arange(9)[None], **rotary_keywords(eager)),
    )
    del ids
    for mask in (additive, None):
        torch.testing.assert_close(other(hidden, rotary, mask)[0], layer(hidden, rotary, mask)[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        other(hidden, rotary, seen[None, None])[0], layer(hidden, rotary, additive)[0], atol=1e-5, rtol=1e-5
    )


def rotary_keywords(model):
    import inspect

    return (
        {"layer_type": "sliding_attention"}
        if "layer_type" in inspect.signature(model.model.rotary_emb.forward).parameters
        else {}
    )


def test_returns_weights_when_asked_without_context():
    query = torch.randn(2, 4, 5, 8)
    _, weights = attend(nn.Module(), query, query, query, None, output_attentions=True)
    assert weights.shape == (2, 4, 5, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5))


def test_attention_dropout_without_context_drops_as_eager_does():
    module = nn.Module().train()
    query = torch.randn(1, 2, 64, 8)
    torch.manual_seed(5)
    dropped, weights = attend(module, query, query, query, None, dropout=0.5)
    assert 0.4 < float((weights == 0).float().mean()) < 0.6
    kept, _ = attend(module.eval(), query, query, query, None, dropout=0.5)
    assert not torch.equal(dropped, kept)


def test_a_mask_is_built_once_for_all_layers(monkeypatch):
    from lightning_fastft.patches import deferred_mask

    built = []
    monkeypatch.setattr(deferred_mask, "eager_mask", lambda **arguments: built.append(arguments))
    mask = defer_mask(batch_size=1, dtype=torch.float32)
    assert built == []
    for _ in range(3):
        mask.additive(torch.float32)
    assert len(built) == 1
    assert defer_mask(attention_mask=mask, batch_size=1) is mask


def test_a_deferred_mask_keeps_the_offset_of_its_forward():
    offset = torch.tensor(3)
    mask = defer_mask(q_offset=offset, batch_size=1)
    offset += 1
    assert int(mask._arguments["q_offset"]) == 3


# What a context refuses


def call(*, length=None, **overrides):
    context = make_batch().context
    length = context.num_tokens if length is None else length
    query = torch.randn(1, 4, length, 8)
    return attend(
        overrides.pop("module", nn.Module()),
        query,
        query,
        query,
        overrides.pop("attention_mask", None),
        **{"context": context, **overrides},
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"length": 30}, ShapeError, "use_cache=False"),
        ({"module": nn.Module().train(), "dropout": 0.1}, BackendError, r"attention_dropout=0\.0"),
        ({"attention_mask": torch.zeros(1, 1, 29, 29)}, BackendError, "its own mask"),
        ({"is_causal": False}, BackendError, "not causal"),
        ({"output_attentions": True}, BackendError, "no attention weights"),
        ({"position_bias": torch.zeros(1)}, BackendError, "position_bias"),
        (
            {"attention_mask": DeferredMask({"local_size": 4})},
            BackendError,
            "window or chunk of 4 where the layer passes sliding_window=None",
        ),
        ({"attention_mask": DeferredMask({}), "sliding_window": 4}, BackendError, "sliding_window=4"),
        ({"attention_mask": DeferredMask({"use_vmap": True})}, BackendError, "not causal everywhere"),
        (
            {"attention_mask": DeferredMask({"allow_is_bidirectional_skip": True})},
            BackendError,
            "not causal everywhere",
        ),
    ],
)
def test_a_context_refuses_what_packed_attention_cannot_do(arguments, error, message):
    call()
    with pytest.raises(error, match=message):
        call(**arguments)


def test_attention_dropout_is_refused_with_the_field_of_the_family():
    """GPT-2 drops attention weights by default, and its configuration names the share attn_pdrop."""
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=16, n_positions=64)
    with pytest.raises(BackendError, match=r"attn_pdrop=0\.0"):
        call(module=GPT2Attention(config, layer_idx=0).train(), dropout=config.attn_pdrop)


def test_dropout_outside_training_is_no_dropout():
    call(module=nn.Module().eval(), dropout=0.1)


@pytest.mark.parametrize(
    ("name", "backend"), [("qwen3", "sdpa"), ("gemma3_text", "reference"), ("gpt_oss", "reference")]
)
def test_autocast_is_followed(name, backend):
    """Weights in float32, compute in bf16: query and key norms hand out float32 there, values come in bf16."""
    model, truth = build_tiny(name), build_tiny(name)
    install(model)
    batch = make_batch(backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, logits = run_packed(model, batch)
        _, plain = run_one_by_one(truth, make_documents(), num_items=batch.context.num_items)
    exact = eager_truth(name)[1]
    assert batch.context.reads == {backend: 2}
    assert relative_error(logits, exact) <= 2 * relative_error(plain, exact)
    gradients = take_gradients(model)
    assert all(gradient.dtype is torch.float32 and gradient.isfinite().all() for gradient in gradients.values())


def test_two_rows_are_refused():
    model = build_tiny("llama")
    install(model)
    batch = make_batch()
    with pytest.raises(ShapeError, match="one row"):
        model(
            input_ids=batch["input_ids"].expand(2, -1),
            position_ids=batch["position_ids"],
            attention_mask=batch["attention_mask"].expand(2, -1),
            context=batch.context,
        )


def test_a_family_whose_layers_do_not_pass_their_window_on_is_refused():
    from transformers import PhimoeConfig, PhimoeForCausalLM

    config = PhimoeConfig(
        **sizes(vocab=VOCABULARY, width=32, inner=40, layers=1, heads=4, key_heads=2, positions=64),
        num_local_experts=2,
        sliding_window=WINDOW,
    )
    model = PhimoeForCausalLM(config)
    install(model)
    with pytest.raises(BackendError, match=f"window or chunk of {WINDOW}"):
        model(**make_batch())


# Installing


def test_install_sets_the_implementation_and_undo_restores_it():
    model = build_tiny("qwen3", attention="sdpa")
    patcher = ModelPatcher()
    status = install_attention(model, patcher)
    assert (status.name, status.state, status.reason) == ("packed attention", "active", "qwen3, 2 layers")
    assert model.config._attn_implementation == "fastft"
    patcher.undo()
    assert model.config._attn_implementation == "sdpa"
    assert "fastft" not in model.config.to_json_string()


def test_install_says_so_when_a_family_is_not_tested():
    from transformers import Olmo3Config, Olmo3ForCausalLM

    model = Olmo3ForCausalLM(
        Olmo3Config(
            **sizes(vocab=VOCABULARY, width=32, inner=40, layers=2, heads=4, key_heads=2), sliding_window=WINDOW
        )
    )
    truth = copy.deepcopy(model)
    truth.set_attn_implementation("eager")
    status = install_attention(model, ModelPatcher())
    assert status.state == "active"
    assert "not a tested family" in status.reason
    assert_close(run_packed(model, make_batch())[1], run_one_by_one(truth, make_documents(), num_items=1)[1])


def test_install_refuses_a_family_off_the_interface():
    from transformers import FalconConfig, FalconForCausalLM

    model = FalconForCausalLM(
        FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    )
    with pytest.raises(UnsupportedModelError, match=r"FalconForCausalLM \(falcon\).*attention interface"):
        install_attention(model, ModelPatcher())


def build_composite():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = build_tiny("gemma3_text").config.to_dict()
    vision = sizes(width=16, inner=16, layers=1, heads=2, image_size=16, patch_size=8)
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=95,
        boi_token_index=94,
        eoi_token_index=93,
    )
    return Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")


def test_only_the_text_part_of_a_composite_model_is_changed():
    model, truth = build_composite(), build_composite()
    truth.load_state_dict(model.state_dict())
    patcher = ModelPatcher()
    assert install_attention(model, patcher).reason.startswith("gemma3_text, 2 layers")
    assert model.config.text_config._attn_implementation == "fastft"
    assert model.config.vision_config._attn_implementation == "eager"
    _, logits = run_packed(model.train(), make_batch())
    _, expected = run_one_by_one(truth.eval(), make_documents(), num_items=1)
    assert_close(logits, expected)
    patcher.undo()
    assert model.config._attn_implementation == "eager"
    assert model.config.text_config._attn_implementation == "eager"


def test_register_twice_changes_nothing():
    from transformers import AttentionInterface, AttentionMaskInterface

    register()
    before = len(AttentionInterface()), len(AttentionMaskInterface())
    register()
    assert (len(AttentionInterface()), len(AttentionMaskInterface())) == before
    assert AttentionInterface()["fastft"] is attend


def test_the_name_holds_no_backend_of_transformers():
    from lightning_fastft.patches.attention import NAME

    assert not any(part in NAME for part in ("sdpa", "flex", "flash", "eager", "/", "|"))
    assert importlib.metadata.version("transformers") >= "5.17"


def test_a_context_survives_as_the_same_object_to_every_layer():
    model = build_tiny("llama")
    install(model)
    seen = []
    original = BatchContext.note_read

    def note(self, backend):
        seen.append(id(self))
        original(self, backend)

    batch = make_batch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchContext, "note_read", note)
        model(**batch)
    assert seen == [id(batch.context)] * 2
