"""Loading: what is read is verified, what is initialised equals transformers' own, NF4 and adapters are as asked."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_fastft.core.errors import DataError, MissingDependencyError, OptionError
from lightning_fastft.hf.loading.model import build_model
from lightning_fastft.hf.loading.source import ModelSource
from tests.support.pretend_device import PretendDevice
from tests.support.sizes import tiny_qwen3
from tests.support.tiny_models import TINY, build_tiny

CPU = torch.device("cpu")
CONFIG = tiny_qwen3(width=64, inner=96, tie_word_embeddings=True)
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def random_model(config=None, *, dtype=torch.float32, **options):
    return build_model(ModelSource(config or CONFIG, init="random"), device=CPU, dtype=dtype, **options)


@pytest.fixture
def folder(tmp_path):
    random_model().save_pretrained(tmp_path)
    return tmp_path


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# Random initialisation.


@pytest.mark.parametrize("name", [*TINY, "tied"])
def test_random_model_has_what_transformers_initialises(name):
    config = build_tiny("llama" if name == "tied" else name).config
    config.tie_word_embeddings = name == "tied"
    ours = random_model(config)
    plain = AutoModelForCausalLM.from_config(config)
    theirs = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    found = {**dict(ours.named_parameters()), **dict(ours.named_buffers())}
    assert {key: (value.shape, value.dtype) for key, value in found.items()} == {
        key: (value.shape, value.dtype) for key, value in theirs.items()
    }
    for key, expected in theirs.items():
        value = found[key]
        assert torch.isfinite(value).all(), key
        if expected.unique().numel() == 1 or "inv_freq" in key:
            # Constants (norms, biases) and what follows from the configuration (rotary frequencies) are the same.
            assert torch.equal(value, expected), key
        elif expected.numel() > 256:
            assert 0.8 < float(value.detach().std() / expected.detach().std()) < 1.25, key
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) is config.tie_word_embeddings
    ids = torch.randint(0, 97, (1, 7))
    plain.load_state_dict(ours.state_dict())
    assert torch.equal(ours.eval()(ids).logits, plain.eval()(ids).logits)


def test_random_model_follows_its_seed_and_leaves_the_global_one():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, again, other = random_model(seed=1), random_model(seed=1), random_model(seed=2)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters()))
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert first.training


def test_load_ignores_the_default_device_and_dtype_of_the_caller(folder):
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            models = [random_model(), build_model(ModelSource(str(folder)), device=CPU, dtype=torch.float32)]
    finally:
        torch.set_default_dtype(torch.float32)
    for model in models:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_random_nf4_equals_quantising_the_same_random_weights(tmp_path):
    plain, quantised = (
        random_model(dtype=torch.bfloat16, seed=3),
        random_model(dtype=torch.bfloat16, seed=3, quantization="nf4"),
    )
    plain.save_pretrained(tmp_path)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, device_map={"": "cpu"}, dtype=torch.bfloat16
    )
    assert {key: type(value).__name__ for key, value in quantised.named_parameters()} == {
        key: type(value).__name__ for key, value in stock.named_parameters()
    }
    for key, expected in stock.state_dict().items():
        assert torch.equal(quantised.state_dict()[key], expected), key
    assert quantised.is_loaded_in_4bit
    assert quantised.is_quantized
    assert type(quantised.lm_head) is nn.Linear
    assert quantised.lm_head.weight.dtype == torch.bfloat16
    assert not quantised.model.layers[0].mlp.up_proj.weight.requires_grad


@pytest.mark.parametrize("init", ["random", "pretrained", "quantised files"])
def test_nf4_trains_after_an_evaluation(folder, init):
    source = ModelSource(CONFIG, init="random") if init == "random" else ModelSource(str(folder))
    model = build_model(source, device=CPU, dtype=torch.bfloat16, quantization="nf4")
    if init == "quantised files":
        model.save_pretrained(folder / "nf4")
        model = build_model(ModelSource(str(folder / "nf4")), device=CPU, dtype=torch.bfloat16)
    ids = torch.randint(0, 97, (1, 6))
    with torch.no_grad():
        model.eval()(ids)
    embeddings = model.train().get_input_embeddings()(ids).detach().requires_grad_()
    model(inputs_embeds=embeddings, labels=ids).loss.backward()
    assert float(embeddings.grad.norm()) > 0


# Reading.


def test_pretrained_weights_are_the_ones_in_the_files(folder):
    tensors = load_file(folder / "model.safetensors")
    model = build_model(ModelSource(str(folder)), device=CPU, dtype=torch.float32)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in tensors.items())
    half = build_model(ModelSource(str(folder)), device=CPU, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert model.training


@pytest.mark.parametrize(
    ("family", "quantization", "saved"),
    [
        ("qwen3", "nf4", "bfloat16"),
        ("qwen3", None, "bfloat16"),
        ("qwen3", None, "nf4"),
        ("qwen3_moe", "nf4", "bfloat16"),
    ],
)
def test_a_model_with_another_home_passes_its_device_tensor_by_tensor(family, quantization, saved, tmp_path):
    tiny = build_tiny(family, hidden_size=64, num_hidden_layers=4).bfloat16()
    tiny.save_pretrained(tmp_path)
    if saved == "nf4":
        source = ModelSource(str(tmp_path))
        build_model(source, device=CPU, dtype=torch.bfloat16, quantization="nf4").save_pretrained(tmp_path)
    source, options = ModelSource(str(tmp_path)), {"dtype": torch.bfloat16, "quantization": quantization}
    expected = build_model(source, device=CPU, **options)
    with PretendDevice() as pretended:
        found = build_model(source, device=pretended.device, home=CPU, **options)
    assert {name: type(value) for name, value in found.named_parameters()} == {
        name: type(value) for name, value in expected.named_parameters()
    }
    state = found.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(state[key], value) for key, value in expected.state_dict().items())
    assert {tensor.device for tensor in state.values()} == {CPU}
    largest = max(parameter.numel() for layer in tiny.model.layers for parameter in layer.parameters())
    assert pretended.peak_bytes == (2 * largest if quantization else 0)


FAULTS = {
    "missing from the files": lambda tensors: tensors.pop(WEIGHT),
    "in the files but not in the model": lambda tensors: tensors.update(
        {"model.layers.0.foreign.weight": torch.ones(2)}
    ),
    "of another shape": lambda tensors: tensors.update({WEIGHT: torch.ones(3, 3)}),
    "hold NaN": lambda tensors: tensors[WEIGHT][3].fill_(float("nan")),
    "or infinity": lambda tensors: tensors[WEIGHT][3, 4:5].fill_(float("-inf")),
}


@pytest.mark.covering
@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_weights_are_refused_by_name(folder, fault, quantization):
    edit_weights(folder, FAULTS[fault])
    with pytest.raises(DataError, match=fault) as error:
        build_model(ModelSource(str(folder)), device=CPU, dtype=torch.bfloat16, quantization=quantization)
    assert ("foreign.weight" if "not in the model" in fault else WEIGHT) in str(error.value)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        build_model(ModelSource(str(folder)), device=CPU, dtype=torch.float32)


def test_code_of_a_model_repository_is_never_run(folder):
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    trace = folder / "trace"
    (folder / "evil.py").write_text(f"open({str(trace)!r}, 'w').write('ran')\n")
    (folder / "config.json").write_text(json.dumps(config))
    build_model(ModelSource(str(folder)), device=CPU, dtype=torch.float32)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "unheard_of"}))
    with pytest.raises(ValueError, match="trust_remote_code"):
        build_model(ModelSource(str(folder)), device=CPU, dtype=torch.float32)
    assert not trace.exists()


def test_adapter_folder_is_refused_with_the_reason(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(OptionError, match="PEFT adapters"):
        build_model(ModelSource(str(tmp_path)), device=CPU, dtype=torch.float32)
    # Commands read the configuration first.
    with pytest.raises(OptionError, match="PEFT adapters"):
        _ = ModelSource(str(tmp_path)).config


def test_missing_bitsandbytes_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingDependencyError, match=r"lightning-fastft\[qlora\]"):
        random_model(quantization="nf4")
