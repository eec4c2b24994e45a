import copy
import pickle

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_fastft.core.errors import ContextError, UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.packing.collate import collate
from lightning_fastft.packing.document import Document
from lightning_fastft.patches.head import LazyHead, check_objective, install_head
from lightning_fastft.patches.lazy_logits import LazyLogits
from tests.support.tiny_models import VOCABULARY, build_tiny
from tests.support.truth import Watch

# The head alone is tested: attention of these models is their own.
pytestmark = pytest.mark.usefixtures("unprepared_models")
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "granite", "cohere", "gpt_oss", "mixtral")


def build(name="llama", **overrides):
    if name == "gemma3_text":
        overrides = {"final_logit_softcapping": 4.0, **overrides}
    if name != "cohere":
        return build_tiny(name, **overrides)
    config = AutoConfig.for_model(
        "cohere",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        logit_scale=0.3,
        pad_token_id=0,
        **overrides,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def make_batch(*, seed=0, num_items=None, pad_to=48, share_labelled=0.5):
    random = np.random.default_rng(seed)
    documents = []
    for length in (11, 1, 17, 6):
        ids = random.integers(3, VOCABULARY, length)
        documents.append(Document(ids, np.where(random.random(length) < share_labelled, ids, -100)))
    return collate(documents, pad_to=pad_to, num_items=num_items)


def batch_of(batch):
    return dict(zip(batch.keys(), map(batch.__getitem__, batch.keys())))


def run(model, batch, **kwargs):
    model.zero_grad(set_to_none=True)
    output = model(**{**batch_of(batch), **kwargs})
    output.loss.backward()
    return output, {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def assert_same(expected, ours, *, tolerance=1e-6, check_dtype=True):
    (output, gradients), (our_output, our_gradients) = expected, ours
    torch.testing.assert_close(our_output.loss, output.loss, rtol=tolerance, atol=0, check_dtype=check_dtype)
    assert gradients.keys() == our_gradients.keys()
    for name, gradient in gradients.items():
        error = (our_gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error <= 2 * tolerance, f"{name}: {error}"


@pytest.mark.covering
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_loss_and_gradients_equal_transformers_own(name, tie):
    model = build(name, tie_word_embeddings=tie).train()
    batch = make_batch(num_items=7.5)
    expected = run(model, batch)
    status = install_head(model, ModelPatcher())
    assert status.state == "active"
    ours = run(model, batch)
    assert isinstance(ours[0].logits, LazyLogits)
    assert ours[0].logits._tensor is None
    assert_same(expected, ours)


def published_logits(model, states):
    """The logits by the formula of a family. The lazy head follows any formula of transformers, also a changed one."""
    config, logits = model.config, states @ model.get_output_embeddings().weight.T
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_lazy_logits_become_the_models_own_logits(name):
    model, states = build(name).eval(), []
    batch = make_batch()
    with torch.no_grad():
        model.get_output_embeddings().register_forward_pre_hook(lambda _, args: states.extend(args))
        expected = model(**batch).logits
        torch.testing.assert_close(expected, published_logits(model, states[0]))
        install_head(model, ModelPatcher())
        lazy = model(**batch).logits
    assert isinstance(lazy, LazyLogits)
    assert lazy.shape == expected.shape
    assert torch.equal(lazy.tensor(), expected)


@pytest.mark.covering
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_reports_statistics_without_logits(name, mode):
    model = build(name).eval()
    batch = make_batch()
    with mode():
        expected = model(**batch)
        install_head(model, ModelPatcher())
        output = model(**batch)
    targets = batch["labels"][0, 1:]
    logits_TV = expected.logits[0, :-1].float()
    is_labelled_T = targets != -100
    nll_sum, num_correct, num_labelled = output.logits.statistics
    assert output.logits._tensor is None
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        nll_sum, torch.nn.functional.cross_entropy(logits_TV, targets, reduction="sum"), rtol=1e-6, atol=0
    )
    assert num_correct.item() == (logits_TV.argmax(-1)[is_labelled_T] == targets[is_labelled_T]).sum().item()
    assert num_labelled == is_labelled_T.sum().item() == batch.context.num_labelled


def test_accumulated_micro_batches_equal_one_loss_over_all():
    model = build().train()
    batches = [make_batch(seed=seed, num_items=23.0) for seed in (1, 2)]
    gradients = []
    for is_ours in (False, True):
        if is_ours:
            install_head(model, ModelPatcher())
        model.zero_grad(set_to_none=True)
        for batch in batches:
            model(**batch).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert (gradients[1][name] - gradient).norm() <= 2e-6 * gradient.norm(), name


def test_a_batch_without_labels_trains_nothing_and_breaks_nothing():
    model = build().train()
    install_head(model, ModelPatcher())
    output, gradients = run(model, make_batch(share_labelled=0.0))
    assert output.loss.item() == 0.0
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("num_items", [None, 5, 5.5, torch.tensor(5), torch.tensor(5.5)])
def test_every_form_of_num_items_means_what_transformers_means(num_items):
    model, batch = build().train(), make_batch()
    expected = run(model, batch, num_items_in_batch=num_items)
    install_head(model, ModelPatcher())
    assert_same(expected, run(model, batch, num_items_in_batch=num_items))


def test_full_logits_never_exist_and_the_host_never_waits():
    model = build().train()
    batch = make_batch(pad_to=300)
    rows = {}
    for is_ours in (False, True):
        if is_ours:
            install_head(model, ModelPatcher())
        with Watch() as watch:
            model(**batch).loss.backward()
        rows[is_ours] = max(shape[:-1].numel() for shape in watch.shapes if shape and shape[-1] == VOCABULARY)
    # The bucket of labelled rows, not the pack.
    assert rows == {False: 300, True: 128}
    assert watch.waits == []


def test_a_peft_model_is_served():
    model = get_peft_model(
        build(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).train()
    batch = make_batch(num_items=3.0)
    expected = run(model, batch)
    assert install_head(model.get_base_model(), ModelPatcher()).state == "active"
    ours = run(model, batch)
    assert isinstance(ours[0].logits, LazyLogits)
    assert_same(expected, ours)
    assert all("lora" in name for name in ours[1])


def test_a_copied_output_layer_is_lazy_also_while_adapters_are_off():
    config = LoraConfig(r=4, init_lora_weights=False, modules_to_save=["lm_head"], target_modules=["q_proj"])
    model = get_peft_model(build(), config).train()
    with torch.no_grad():
        model.get_base_model().lm_head.modules_to_save["default"].weight.mul_(1.5)
    batch = make_batch(num_items=3.0)
    expected = run(model, batch)
    with model.disable_adapter():
        plain = model(**batch).loss.detach()
    patcher = ModelPatcher()
    assert install_head(model.get_base_model(), patcher).state == "active"
    assert_same(expected, run(model, batch))
    check_objective(model.get_base_model())
    with model.disable_adapter():
        output = model(**batch)
    assert not isinstance(output.logits, torch.Tensor)
    assert float(output.loss) == pytest.approx(float(plain), rel=1e-5)
    patcher.undo()
    assert type(model.get_base_model().lm_head.original_module) is nn.Linear


def test_an_adapted_output_layer_keeps_its_own_path():
    config = {"target_modules": ["q_proj", "lm_head"]}
    model = get_peft_model(build(), LoraConfig(r=4, init_lora_weights=False, **config)).train()
    batch = make_batch(num_items=3.0)
    expected = run(model, batch)
    patcher = ModelPatcher()
    status = install_head(model.get_base_model(), patcher)
    assert status.state == "inactive"
    assert "the output layer has an adapter" in status.reason
    assert status.remedy
    assert len(patcher) == 0
    ours = run(model, batch)
    assert isinstance(ours[0].logits, torch.Tensor)
    assert_same(expected, ours, tolerance=0)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_checkpointing_changes_nothing(name):
    model, batch = build(name).train(), make_batch(num_items=9.0)
    expected = run(model, batch)
    install_head(model, ModelPatcher())
    model._set_gradient_checkpointing(
        enable=True,
        gradient_checkpointing_func=lambda function, *args: torch.utils.checkpoint.checkpoint(
            function, *args, use_reentrant=False
        ),
    )
    assert_same(expected, run(model, batch))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_auxiliary_loss_of_routers_stays_in_the_loss(name):
    # Gradients of sinks are small differences of large sums: in fp32 their last digits are luck.
    model, batch = build(name, router_aux_loss_coef=0.5).double().train(), make_batch(num_items=9.0)
    model.set_experts_implementation("eager")
    expected = run(model, batch, output_router_logits=True)
    install_head(model, ModelPatcher())
    ours = run(model, batch, output_router_logits=True)
    # transformers computes its loss in fp32.
    assert_same(expected, ours, check_dtype=False)
    torch.testing.assert_close(ours[0].aux_loss, expected[0].aux_loss)
    assert (run(model, batch)[0].loss - ours[0].loss).abs() > 1e-3


@pytest.mark.parametrize("is_lazy", [True, False], ids=["lazy", "tensor"])
def test_labels_of_the_callers_own_cross_no_border(is_lazy):
    """labels = input_ids also labels the first token of each document and the pad tail."""
    model, batch = build().train(), make_batch(num_items=9.0)
    every, inside = batch["input_ids"].clone(), batch["input_ids"].clone()
    inside[0, batch.context.start_S1[:-1]] = -100
    inside[0, batch.context.num_real_tokens :] = -100
    expected = run(model, batch, labels=inside, num_items_in_batch=4.0)
    install_head(model, ModelPatcher())
    batch.context.output_logits = not is_lazy
    ours = run(model, batch, labels=every, num_items_in_batch=4.0)
    assert isinstance(ours[0].logits, LazyLogits) == is_lazy
    assert_same(expected, ours)
    # None is the mean over the labels that are left.
    mean = model(**{**batch_of(batch), "labels": every, "num_items_in_batch": None}).loss
    torch.testing.assert_close(mean, ours[0].loss * 4.0 / int((inside != -100).sum()))


def test_changed_labels_with_the_planned_divisor_are_named_once():
    model, batch = build().train(), make_batch(num_items=9.0)
    install_head(model, ModelPatcher())
    other = batch["labels"].clone()
    run(model, batch)
    run(model, batch, labels=other, num_items_in_batch=5.0)
    with torch.no_grad():
        model(**{**batch_of(batch), "labels": other})
    with pytest.warns(UserWarning, match="num_items_in_batch=None"):
        run(model, batch, labels=other)
    run(model, batch, labels=other)


def test_labels_of_the_callers_own_are_used():
    model, batch = build().train(), make_batch(num_items=9.0)
    other = batch["labels"].clone()
    other[0, 2:9] = 7
    shifted = torch.randint(0, VOCABULARY, other.shape)
    expected = [
        run(model, batch, labels=other),
        run(model, batch, shift_labels=shifted),
        run(model, batch, labels=batch["labels"].clone()),
    ]
    install_head(model, ModelPatcher())
    with pytest.warns(UserWarning, match="labels of a packed batch were changed"):
        ours = [
            run(model, batch, labels=other),
            run(model, batch, shift_labels=shifted),
            run(model, batch, labels=batch["labels"].clone()),
        ]
    for one, two in zip(expected, ours):
        assert isinstance(two[0].logits, LazyLogits)
        assert_same(one, two)


def as_it_is(batch):
    return batch


def through_a_worker(batch):
    return pickle.loads(pickle.dumps(batch))


def to_a_device(batch):
    # A device to copy to is not everywhere.
    return batch._map(torch.clone, batch.context._map(torch.clone))


@pytest.mark.parametrize("move", [as_it_is, through_a_worker, to_a_device])
def test_labels_changed_in_place_are_used(move):
    model, batch = build().train(), make_batch(num_items=9.0)
    batch["labels"][0, 2:9] = 7
    expected = run(model, batch)
    install_head(model, ModelPatcher())
    with pytest.warns(UserWarning, match="labels of a packed batch were changed"):
        assert_same(expected, run(model, move(batch)))


@pytest.mark.parametrize("move", [through_a_worker, to_a_device])
def test_moved_labels_are_those_of_the_pack(move):
    model, batch = build().train(), make_batch(num_items=9.0)
    expected = run(model, batch)
    install_head(model, ModelPatcher())
    # A warning would be an error.
    assert_same(expected, run(model, move(batch)))


def test_sliced_states_give_tensor_logits():
    model, batch = build().train(), make_batch(num_items=9.0)
    keep = batch.context.labelled_row_R[: batch.context.num_labelled]
    arguments = {
        "logits_to_keep": keep,
        "shift_labels": batch.context.labelled_target_R[None, : batch.context.num_labelled],
    }
    expected = run(model, batch, **arguments)
    install_head(model, ModelPatcher())
    ours = run(model, batch, **arguments)
    assert isinstance(ours[0].logits, torch.Tensor)
    assert_same(expected, ours)


@pytest.mark.parametrize("how", ["keyword", "context"])
def test_logits_can_be_asked_for(how):
    model, batch = build().train(), make_batch(num_items=9.0)
    expected = run(model, batch)
    install_head(model, ModelPatcher())
    batch.context.output_logits = how == "context"
    ours = run(model, batch, **({"output_logits": True} if how == "keyword" else {}))
    assert isinstance(ours[0].logits, torch.Tensor)
    assert torch.equal(ours[0].logits, expected[0].logits)
    assert_same(expected, ours)


def test_without_a_context_nothing_changes():
    model = build().eval()
    batch = make_batch()
    ids, mask = batch["input_ids"][:, :12], torch.ones(1, 12, dtype=torch.int64)
    arguments = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    generation = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad():
        expected, generated = model(**arguments), model.generate(ids, attention_mask=mask, **generation)
        install_head(model, ModelPatcher())
        model(**batch)
        output = model(**arguments)
        assert torch.equal(model.generate(ids, attention_mask=mask, **generation), generated)
    assert isinstance(output.logits, torch.Tensor)
    assert torch.equal(output.logits, expected.logits)
    assert torch.equal(output.loss, expected.loss)


def test_a_forward_that_failed_leaves_no_armed_head():
    model, batch = build().train(), make_batch()
    install_head(model, ModelPatcher())
    handle = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    handle.remove()
    assert isinstance(model(input_ids=batch["input_ids"]).logits, torch.Tensor)


def test_the_head_is_armed_for_one_call():
    model, batch = build().train(), make_batch()
    install_head(model, ModelPatcher())
    states = model.model(input_ids=batch["input_ids"], context=batch.context).last_hidden_state
    assert isinstance(model.lm_head(states), LazyLogits)
    assert isinstance(model.lm_head(states), torch.Tensor)


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_the_head_run(register):
    model, batch, seen = build(), make_batch(), []
    install_head(model, ModelPatcher())
    getattr(model.lm_head, register)(lambda *each: seen.append(each))
    model(**batch).loss.backward()
    assert len(seen) == 1


def test_undo_restores_everything():
    model, batch = build().train(), make_batch(num_items=9.0)
    before_head, before_loss, before_keys = model.lm_head, model.loss_function, list(model.state_dict())
    before_attributes, before_vars = set(vars(model)), set(vars(model.lm_head))
    expected = run(model, batch)
    patcher = ModelPatcher()
    install_head(model, patcher)
    assert list(model.state_dict()) == before_keys
    assert type(model.lm_head) is LazyHead
    assert model.lm_head.weight is before_head.weight
    patcher.undo()
    assert model.lm_head is before_head
    assert model.loss_function is before_loss
    assert (set(vars(model)), set(vars(model.lm_head))) == (before_attributes, before_vars)
    assert not model.model._forward_pre_hooks
    assert_same(expected, run(model, batch), tolerance=0)


def test_installing_twice_changes_nothing_more():
    model, patcher = build(), ModelPatcher()
    install_head(model, ModelPatcher())
    assert install_head(model, patcher).state == "active"
    assert len(patcher) == 0


def test_saved_files_and_copies_are_the_models_own(tmp_path):
    model, batch = build().train(), make_batch(num_items=9.0)
    expected = run(model, batch)
    install_head(model, ModelPatcher())
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    assert_same(expected, run(reloaded, batch), tolerance=0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
    assert isinstance(twin(**batch).logits, LazyLogits)
    assert_same(expected, run(model, batch))
    assert isinstance(twin(input_ids=batch["input_ids"]).logits, torch.Tensor)


def test_a_loss_or_a_head_of_the_models_own_is_left_alone():
    model = build()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    assert install_head(model, ModelPatcher()).state == "inactive"
    assert install_head(build().model, ModelPatcher()).state == "inactive"
    model = build()
    model.lm_head.forward = model.lm_head.forward
    assert "forward" in install_head(model, ModelPatcher()).reason
    model = build()
    model.lm_head.compile(backend="eager")
    assert "compiled" in install_head(model, ModelPatcher()).reason


@pytest.mark.parametrize("lacks", ["no output layer", "no decoder apart"])
def test_a_model_without_a_plain_head_is_left_alone_and_says_what_it_lacks(monkeypatch, lacks):
    model = build()
    if lacks == "no output layer":
        monkeypatch.setattr(model, "get_output_embeddings", lambda: None)
    else:
        monkeypatch.setattr(model, "base_model_prefix", "")
    status = install_head(model, patcher := ModelPatcher())
    assert status.state == "inactive"
    assert lacks in status.reason
    assert len(patcher) == 0


class TestLazyLogits:
    @pytest.fixture
    def lazy(self):
        model, batch = build(), make_batch()
        install_head(model, ModelPatcher())
        return model(**batch).logits

    @pytest.mark.parametrize(
        "use",
        [
            lambda logits: logits[..., :5],
            lambda logits: logits.float(),
            lambda logits: torch.softmax(logits, dim=-1),
            lambda logits: torch.nn.functional.cross_entropy(logits[0], torch.zeros(48, dtype=torch.int64)),
            lambda logits: logits + 1,
            lambda logits: 1 - logits,
            lambda logits: logits * torch.arange(VOCABULARY),
            lambda logits: logits / torch.full((1,), 2.0),
            lambda logits: logits > 0,
            lambda logits: torch.cat([logits, logits]),
            lambda logits: torch.tanh(torch.tanh(logits)),
            lambda logits: logits.argmax(-1),
            lambda logits: (2 * (logits / 3)) + 0,
            lambda logits: torch.mul(logits, 0.5) * 1,
            lambda logits: torch.stack(list(logits)),
            lambda logits: -logits,
            lambda logits: logits**2,
            lambda logits: logits == logits[0, 0, 0],
            lambda logits: logits != logits[0, 0, 0],
        ],
    )
    def test_any_other_use_gives_what_the_tensor_gives(self, lazy, use):
        result = use(lazy)
        result = result.tensor() if isinstance(result, LazyLogits) else result
        assert torch.equal(result, use(lazy.tensor()))

    def test_gradients_flow_through_the_tensor(self, lazy):
        (lazy * 2)[0, 3].sum().backward()
        assert lazy.weight.grad is not None

    @pytest.mark.parametrize(
        ("use", "scale", "softcap"),
        [
            (lambda logits: logits * 2 / 8, 0.25, None),
            (lambda logits: torch.tanh(logits / 5) * 5, 1.0, 5.0),
            (lambda logits: torch.tanh(logits * 3 / 6) * 4 / 2, 1.0, 2.0),
        ],
    )
    def test_scale_and_softcap_are_recorded(self, lazy, use, scale, softcap):
        recorded = use(lazy)
        assert isinstance(recorded, LazyLogits)
        assert recorded.scale == pytest.approx(scale)
        assert recorded.softcap == (None if softcap is None else pytest.approx(softcap))
        assert recorded._tensor is None
        assert torch.equal(recorded.tensor(), use(lazy.tensor()))

    def test_a_first_read_without_gradients_leaves_later_ones_theirs(self, lazy):
        with torch.no_grad():
            assert not lazy.argmax(-1).requires_grad
        assert lazy.logsumexp(-1).requires_grad
        with torch.inference_mode():
            lazy.argmax(-1)
        lazy.logsumexp(-1).sum().backward()
        assert lazy.weight.grad is not None

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_logits_of_a_forward_without_gradients_have_none(self, mode):
        model, batch = build(), make_batch()
        install_head(model, ModelPatcher())
        with mode():
            lazies = [model(**batch).logits for _ in range(2)]
        assert not (lazies[0] * 1.5).log_softmax(-1).requires_grad
        assert not lazies[1].log_probs().log_prob_R.requires_grad

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_autocast_is_that_of_the_forward(self, dtype):
        model, batch = build().to(dtype), make_batch()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            truth = model(**batch).logits
            install_head(model, ModelPatcher())
            lazy = model(**batch).logits
        assert lazy.dtype is torch.bfloat16
        assert torch.equal(lazy.tensor(), truth)

    def test_changes_in_place_are_those_of_the_tensor(self, lazy):
        truth = lazy.tensor().detach().clone() / 2
        truth[0, 1, 2] = -9.0
        with torch.no_grad():
            lazy.div_(2)
            lazy[0, 1, 2] = -9.0
            for value, use in ((lazy.float(), truth), (lazy * 2, truth * 2), (torch.tanh(lazy), truth.tanh())):
                assert torch.equal(value, use)
        with pytest.raises(ContextError, match="in place"):
            lazy.log_probs()

    def test_the_loss_function_of_the_model_sees_changes_in_place(self):
        model, batch = build(), make_batch()
        install_head(model, ModelPatcher())
        with torch.no_grad():
            output = model(**batch)
            output.logits.div_(2)
            loss = model.loss_function(output.logits, batch["labels"], VOCABULARY)
            truth = model.loss_function(output.logits.tensor(), batch["labels"], VOCABULARY)
        assert torch.equal(loss, truth)
        assert loss != output.loss

    @pytest.mark.parametrize("read", [LazyLogits.tensor, LazyLogits.log_probs], ids=["tensor", "log_probs"])
    def test_a_first_read_after_a_step_of_the_optimizer_is_refused(self, read):
        model, batch = build(), make_batch()
        install_head(model, ModelPatcher())
        output = model(**batch)
        before = model(**batch).logits
        before.tensor()
        output.loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert before.argmax(-1).shape == (1, 48)
        with pytest.raises(ContextError, match="optimizer"):
            read(output.logits)

    def test_probing_for_protocols_costs_nothing(self, lazy):
        assert not hasattr(lazy, "__array__")
        assert lazy.device.type == "cpu"
        assert lazy.dtype is torch.float32
        assert len(lazy) == 1
        assert "LazyLogits" in repr(lazy)
        assert lazy._tensor is None


class TestObjective:
    """A loss of the caller's own on the labelled rows, inside the model's forward."""

    @staticmethod
    def full_logits(model, batch):
        """The model's own logits of the labelled rows, after its scale and soft cap."""
        context = batch.context
        logits_TV = model(**{**batch_of(batch), "context": None}).logits[0]
        return logits_TV[context.labelled_row_R[: context.num_labelled]].float()

    @pytest.mark.covering
    @pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3_text", "granite", "cohere"])
    @pytest.mark.parametrize("temperature", [1.0, 2.5])
    def test_log_probs_equal_those_of_full_logits(self, name, temperature):
        model, batch = build(name).train(), make_batch()
        count = batch.context.num_labelled
        log_share_RV = (self.full_logits(model, batch) / temperature).log_softmax(dim=1)
        expected_R = log_share_RV.gather(1, batch.context.labelled_target_R[:count, None])[:, 0]
        model.zero_grad(set_to_none=True)
        (expected_R.exp() * torch.linspace(-1, 2, count)).sum().backward()
        expected = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        install_head(model, ModelPatcher())
        log_probs = model(**batch).logits.log_probs(temperature=temperature, with_entropy=True)
        torch.testing.assert_close(log_probs.log_prob_R[:count], expected_R)
        torch.testing.assert_close(log_probs.entropy_R[:count], -(log_share_RV.exp() * log_share_RV).sum(dim=1))
        assert (log_probs.log_prob_R[count:] == 0).all()
        batch.context.objective = lambda logits: (
            logits.log_probs(temperature=temperature).log_prob_R[:count].exp() * torch.linspace(-1, 2, count)
        ).sum()
        _, gradients = run(model, batch)
        for key, gradient in expected.items():
            torch.testing.assert_close(gradients[key], gradient, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("kind", ["forward_kl", "jsd"])
    def test_divergence_equals_that_of_full_logits(self, kind):
        student, teacher, batch = build("gemma2").train(), build("granite", hidden_size=48).eval(), make_batch()
        with torch.no_grad():
            log_p_RV = (self.full_logits(teacher, batch) / 2.0).log_softmax(dim=1)
        log_q_RV = (self.full_logits(student, batch) / 2.0).log_softmax(dim=1)
        to_RV = log_q_RV if kind == "forward_kl" else (0.3 * log_p_RV.exp() + 0.7 * log_q_RV.exp()).log()
        expected_R = (log_p_RV.exp() * (log_p_RV - to_RV)).sum(dim=1)
        if kind == "jsd":
            expected_R = 0.3 * expected_R + 0.7 * (log_q_RV.exp() * (log_q_RV - to_RV)).sum(dim=1)
        for model in (student, teacher):
            install_head(model, ModelPatcher())
        lazy, of_teacher = student(**batch).logits, teacher(**batch).logits
        found_R = lazy.divergence(of_teacher, kind=kind, beta=0.3, temperature=2.0)
        torch.testing.assert_close(found_R[: batch.context.num_labelled], expected_R, rtol=1e-4, atol=1e-6)
        found_R.sum().backward()
        assert student.model.layers[0].mlp.up_proj.weight.grad is not None
        assert teacher.lm_head.weight.grad is None
        with pytest.raises(ContextError):
            lazy.divergence(teacher(**make_batch()).logits)

    def test_stored_divergence_of_the_students_own_tokens_is_zero(self):
        model, batch = build("gemma2").train(), make_batch()
        count, num_padded = batch.context.num_labelled, len(batch.context.labelled_row_R)
        stored = (self.full_logits(model, batch).detach() / 2.0).log_softmax(dim=1).topk(4, dim=1)
        id_RK, log_prob_RK = (
            torch.nn.functional.pad(tensor, (0, 0, 0, num_padded - count)) for tensor in (stored.indices, stored.values)
        )
        install_head(model, ModelPatcher())
        lazy = model(**batch).logits
        for tail in ("bucket", "renormalise"):
            zeros_R = lazy.topk_divergence(id_RK, log_prob_RK, temperature=2.0, tail=tail)
            torch.testing.assert_close(zeros_R, torch.zeros(num_padded), rtol=0, atol=1e-5)
            assert lazy.topk_divergence(id_RK, log_prob_RK, tail=tail)[:count].min() > 1e-4

    def test_the_loss_is_the_objective_in_training_and_evaluation(self):
        model, batch = build().train(), make_batch()
        install_head(model, ModelPatcher())
        cross_entropy = model(**batch).loss
        batch.context.objective = lambda logits: -logits.log_probs().log_prob_R.mean()
        loss = model(**batch).loss
        assert loss != cross_entropy
        assert loss.grad_fn is not None
        with torch.no_grad():
            assert torch.equal(model.eval()(**batch).loss, loss)

    def test_an_objective_of_tensor_logits_is_refused(self):
        model, batch = build().train(), make_batch()
        install_head(model, ModelPatcher())
        batch.context.objective = lambda logits: logits.log_probs().log_prob_R.mean()
        for options in ({"output_logits": True}, {"logits_to_keep": 3}):
            with pytest.raises(ContextError, match="objective"):
                model(**batch, **options)
        # A call without a loss leaves nothing for the next one, without that context.
        assert isinstance(model(**{**batch_of(batch), "labels": None}).logits, LazyLogits)
        assert torch.isfinite(model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)

    def test_a_model_without_a_lazy_head_is_refused(self):
        model = build()
        with pytest.raises(UnsupportedModelError, match="not installed"):
            check_objective(model)
        install_head(model, ModelPatcher())
        check_objective(model)
        model = get_peft_model(build(), LoraConfig(r=4, target_modules=["q_proj", "lm_head"]))
        install_head(model.get_base_model(), ModelPatcher())
        with pytest.raises(UnsupportedModelError, match="lm_head"):
            check_objective(model.get_base_model())
