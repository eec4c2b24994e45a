"""A model with fused layers beside its twin with the layers of transformers, and what both of them give."""

import contextlib
import copy
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model

from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.install import install_fused_layers
from lightning_fastft.fused.layer_forms import LAYERS
from lightning_fastft.hf.families import decoder_layers, find_causal_models
from lightning_fastft.patches.packed import install_packed_training
from tests.support.packs import relative_error
from tests.support.tiny_models import MORE_DENSE, VOCABULARY, build_tiny, has_experts

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
}
# name -> (tiny model, what differs): every class of LAYERS, and with them biases, windows, sinks, soft caps, partly
# rotated heads, scaled angles, tied embeddings and mixed blocks. Gemma 3 has the attribute of a soft cap, which its
# layers do not hand to attention.
FAMILIES = {
    **{name: (name, {}) for name in MORE_DENSE},
    "llama": ("llama", {}),
    "llama biased": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "mistral": ("mistral_windowed", {}),
    "mixtral": ("mixtral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", {"mlp_only_layers": [0]}),
    "qwen3": ("qwen3", {"rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", {}),
    "gpt_oss": ("gpt_oss", {"rope_parameters": YARN}),
    "phi3": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}},
    ),
    "phi3 longrope": ("phi3", {"rope_parameters": LONGROPE, "head_dim": 8}),
    "glm4_moe": ("glm4_moe", {"use_qk_norm": True, "attention_bias": True}),
    "mellum": ("mellum", {}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
    "smollm3": ("smollm3", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "attention_bias": True, "rms_norm_eps": 1e-3},
    ),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": ("granitemoe", {"residual_multiplier": 0.5}),
    "olmo2": ("olmo2", {"rms_norm_eps": 1e-3}),
    "lfm2": ("lfm2", {}),
    "lfm2_moe": ("lfm2_moe", {}),
    "minimax_m2": ("minimax_m2", {}),
}
DENSE = tuple(family for family, (name, _) in FAMILIES.items() if not has_experts(name))
TRAINED = ("lora", "full", "norms")


def build(family, trained, *, dtype=torch.float32, **overrides):
    """A model of a family in training mode: with LoRA on every linear layer, trained as a whole, or with nothing
    but its norms trained.
    """
    name, differences = FAMILIES[family]
    # The loop over experts: the one implementation that takes float64.
    model = build_tiny(name, experts=None if family in DENSE else "eager", **{**differences, **overrides}).to(dtype)
    if trained == "lora":
        model = add_lora(model)
    for parameter_name, parameter in model.named_parameters():
        if trained == "norms":
            parameter.requires_grad_("norm" in parameter_name)
    return model.train()


def add_lora(model, *, adapter_dtype=None, **options):
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False, **options}
    model = get_peft_model(model, LoraConfig(**options), autocast_adapter_dtype=False)
    if adapter_dtype is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(adapter_dtype)
    return model


def layers_of(model):
    ((_, causal),) = find_causal_models(model)
    return decoder_layers(causal)


def fuse(model):
    """Swap, and return the patcher; what is not swapped is an error."""
    patcher = ModelPatcher()
    (status,) = install_fused_layers(model, patcher)
    assert status.state == "active", status
    return patcher


def make_pair(model):
    """The model with fused layers, and its twin with transformers' own; both with packed attention and the lazy
    head.
    """
    plain = copy.deepcopy(model)
    for each in (model, plain):
        install_packed_training(each, ModelPatcher())
    fuse(model)
    return model, plain


def step(model, batch, *, seed=7, **options):
    """Loss and every gradient of one batch."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = model(**batch, **options).loss
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return {"loss": loss.detach(), **found}


def padded_batch(*, lengths=(9, 4, 7), is_left=False, seed=3):
    """Rows of several lengths, padded on one side."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(lengths), width), generator=generator)
    mask = torch.stack(
        [(torch.arange(width) >= width - length) if is_left else (torch.arange(width) < length) for length in lengths]
    ).long()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": torch.where(mask.bool(), ids, -100),
        "use_cache": False,
    }


def use_exact_norms(model, *, is_plain):
    """Norms without transformers' fp32 in the middle, so that float64 is float64; of a fused model only the last
    one is computed by its module.
    """
    ((_, causal),) = find_causal_models(model)
    norms = (
        [last_norm(causal)]
        if not is_plain
        else [module for module in causal.modules() if type(module).__name__.endswith("RMSNorm")]
    )
    for norm in norms:
        # Gemma's norms name their eps otherwise, and their weights count from 1.
        eps, offset = (norm.eps, 1.0) if hasattr(norm, "eps") else (norm.variance_epsilon, 0.0)
        norm.forward = lambda x, norm=norm, eps=eps, offset=offset: (
            (norm.weight + offset) * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
        )


def last_norm(causal):
    """The norm in front of the head."""
    return causal.get_decoder().get_submodule(LAYERS[own_class(decoder_layers(causal)[0]).__name__].last_norm)


def form_of(model):
    """The form of the layers of a model."""
    return LAYERS[own_class(layers_of(model)[0]).__name__]


def own_class(layer):
    """The class of transformers of a layer, fused or not."""
    return next(kind for kind in type(layer).__mro__ if kind.__module__.startswith("transformers."))


def assert_as_near(found, *, own, truth):
    """Errors of a step are at most twice those of the layers' own forward in the same dtype, tensor by tensor.

    Where a few numbers are the whole error it scatters: the factors of an adapter count as one, and so do all sinks and
    biases of routers.
    """
    assert found.keys() == own.keys() == truth.keys()
    assert all(found[name].dtype is value.dtype for name, value in own.items())
    errors = {
        name: (relative_error(found[name], value), relative_error(own[name], value)) for name, value in truth.items()
    }
    loss_error, own_error = errors.pop("loss")
    assert loss_error <= max(2 * own_error, torch.finfo(torch.bfloat16).eps)
    places = {name: "few numbers" if truth[name].numel() < 32 else name.split(".lora_")[0] for name in errors}
    for place in set(places.values()):
        ours, theirs = (
            sum(pair[number] ** 2 for name, pair in errors.items() if places[name] == place) ** 0.5 for number in (0, 1)
        )
        assert ours <= 2 * theirs, (place, ours, theirs)


class OwnForwards:
    """How often the attention layers and feed-forward blocks of transformers ran themselves."""

    def __init__(self):
        self.attention = self.block = 0


@contextlib.contextmanager
def count_own_forwards(model):
    """Count at the classes: a hook would be noticed."""
    counts, layers = OwnForwards(), layers_of(model)
    block = form_of(model).block
    with contextlib.ExitStack() as stack:
        for part, name in (("self_attn", "attention"), (block, "block")):
            for kind in {type(layer._modules[part]) for layer in layers if part in layer._modules}:

                def counted(self, *args, real=kind.forward, name=name, **options):
                    setattr(counts, name, getattr(counts, name) + 1)
                    return real(self, *args, **options)

                stack.enter_context(mock.patch.object(kind, "forward", counted))
        yield counts


def is_served(model, call):
    """Whether no layer's own attention ran during a call; and the call's result."""
    with count_own_forwards(model) as counts:
        result = call()
    assert counts.attention in (0, sum("self_attn" in layer._modules for layer in layers_of(model)))
    return counts.attention == 0, result
