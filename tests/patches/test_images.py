"""Packed documents with images against each document alone, through transformers' own model and processor."""

import pytest
import torch

from lightning_fastft.activations.checkpointing import OffloadCheckpointing
from lightning_fastft.core.errors import UnsupportedModelError
from lightning_fastft.core.patcher import ModelPatcher
from lightning_fastft.fused.install import install_fused_layers
from lightning_fastft.hf.images import IMAGE_FAMILIES, ImageEncoder, check_images, document_images
from lightning_fastft.hf.lora import add_adapters, parse_lora
from lightning_fastft.packing.collate import collate
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.patches.packed import install_packed_training
from lightning_fastft.patches.rotary import forget_lengths
from tests.support import vision
from tests.support.packs import assert_close, summed_loss, take_gradients
from tests.support.vision import bare, build_processor, build_vision_model, make_rows

TOWER = r".*(language_model.*(q_proj|v_proj|down_proj)|visual.*(qkv|proj))"


class Family:
    """A tiny model, its processor, and rows as documents of a pack."""

    def __init__(self, name):
        self.name = name
        self.processor = build_processor(name)
        self.rows, self.images = make_rows()
        self.encoder = ImageEncoder(self.processor)
        self.documents = list(
            tokenize_sources(
                self.rows,
                tokenizer=self.processor.tokenizer,
                options=FormatOptions(max_tokens=512),
                images=self.encoder,
            )
        )

    def build(self, *, lora=None):
        model = build_vision_model(self.name, self.processor.tokenizer)
        if lora is None:
            return model.train()
        adapted = add_adapters(model, lora=parse_lora(lora), adapter_dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
        return adapted.train()

    def prepared(self, config):
        encode = document_images(self.encoder, config=config)
        return [
            document._replace(image_inputs=encode(document)) if document.images else document
            for document in self.documents
        ]

    def run_alone(self, model, *, num_items, before=lambda model: None):
        """The summed loss, with gradients left in the parameters, by the processor's own outputs."""
        total = 0.0
        for row, images, document in zip(self.rows, self.images, self.documents):
            before(model)
            text = self.processor.apply_chat_template(bare(row), tokenize=False)
            inputs = self.processor(text=[text], images=images or None, return_tensors="pt")
            assert inputs["input_ids"][0].tolist() == document.input_ids.tolist()
            logits = model(**inputs, use_cache=False).logits[0]
            loss = summed_loss(logits, torch.as_tensor(document.labels)) / num_items
            loss.backward()
            total += loss.detach()
        return total


@pytest.fixture(scope="module", params=IMAGE_FAMILIES)
def family(request):
    return Family(request.param)


@pytest.fixture(scope="module")
def qwen():
    return Family("qwen2_5_vl")


def run_packed(model, documents, *, num_pad=5, checkpointing=None, fuses=False):
    batch = collate(documents, pad_to=sum(len(document.input_ids) for document in documents) + num_pad)
    patcher = ModelPatcher()
    try:
        installed = install_packed_training(model, patcher, checkpointing=checkpointing)
        if fuses:
            statuses = install_fused_layers(model, patcher)
            assert [status.state for status in statuses] == ["active"]
        assert installed.layers
        output = model(**batch)
        output.loss.backward()
    finally:
        patcher.undo()
    return output.loss.detach(), take_gradients(model), batch


def test_a_pack_equals_its_documents_alone(family):
    model = family.build()
    documents = family.prepared(model.config)
    fuses = family.name in ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4")
    loss, gradients, batch = run_packed(model, documents, fuses=fuses)
    truth = family.run_alone(model, num_items=batch.context.num_items)
    expected = take_gradients(model)
    assert_close(loss, truth)
    assert gradients.keys() == expected.keys()
    assert any(name.startswith(("model.vis", "model.multi")) for name in gradients)
    # A bias of keys shifts all scores of a query alike: its true gradient is zero.
    keys = [name for name in expected if not (name.endswith("k_proj.bias") and "language_model" not in name)]
    assert_close({name: gradients[name] for name in keys}, {name: expected[name] for name in keys})


@pytest.mark.parametrize("fault", ["positions of text", "positions of the neighbour", "images in the wrong order"])
def test_planted_faults_show(qwen, fault):
    model = qwen.build()
    documents = qwen.prepared(model.config)
    truth = qwen.run_alone(model, num_items=collate(documents).context.num_items)
    expected = take_gradients(model)
    broken = plant(documents, fault)
    loss, gradients, _ = run_packed(model, broken)
    assert max(distances(gradients, expected).values()) > 1e-3
    assert abs(float(loss - truth)) > 1e-6


def plant(documents, fault):
    inputs = [document.image_inputs for document in documents]
    if fault == "images in the wrong order":
        # Documents 1 and 3 keep their number of patches where the images are of one size.
        two = inputs[2].tensors
        sizes = two["image_grid_thw"].prod(-1).tolist()
        first, second = two["pixel_values"].split(sizes)
        swapped = {**two, "pixel_values": torch.cat([second, first])}
        return [*documents[:2], documents[2]._replace(image_inputs=inputs[2]._replace(tensors=swapped)), documents[3]]
    if fault == "positions of text":
        length = len(documents[1].input_ids)
        wrong = torch.arange(length).expand(3, length)
    else:
        other = inputs[2].position_AT
        length = len(documents[1].input_ids)
        wrong = (
            other[:, :length]
            if other.shape[1] >= length
            else torch.nn.functional.pad(other, (0, length - other.shape[1]))
        )
    return [documents[0], documents[1]._replace(image_inputs=inputs[1]._replace(position_AT=wrong)), *documents[2:]]


@pytest.mark.parametrize("fault", ["spans of the neighbour", "spans in other layers", "spans one token short"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_planted_faults_of_spans_show(name, fault):
    family = Family(name)
    model = family.build()
    documents = family.prepared(model.config)
    family.run_alone(model, num_items=collate(documents).context.num_items)
    expected = take_gradients(model)
    _, gradients, _ = run_packed(model, [plant_in_spans(document, fault) for document in documents])
    assert max(distances(gradients, expected).values()) > 1e-3


def plant_in_spans(document, fault):
    inputs = document.image_inputs
    if inputs is None:
        return document
    if fault == "spans in other layers":
        changed = inputs._replace(in_windows_only=not inputs.in_windows_only)
    elif fault == "spans of the neighbour":
        changed = inputs._replace(spans=((0, 1),))
    else:
        changed = inputs._replace(spans=tuple((begin, end - 1) for begin, end in inputs.spans))
    return document._replace(image_inputs=changed)


def distances(gradients, expected):
    return {name: float((gradients[name] - expected[name]).norm() / expected[name].norm()) for name in expected}


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_images_that_see_both_directions_need_their_spans(name):
    family = Family(name)
    model = family.build()
    documents = family.prepared(model.config)
    causal = [
        document
        if (inputs := document.image_inputs) is None
        else document._replace(image_inputs=inputs._replace(spans=()))
        for document in documents
    ]
    with pytest.raises(UnsupportedModelError, match="PackedDataModule"):
        run_packed(model, causal)
    # Text alone has none.
    run_packed(model, [document for document in documents if document.image_inputs is None])


def test_images_of_the_smaller_gemma_4_are_causal():
    family = Family("gemma4")
    model = family.build()
    model.config.text_config.use_bidirectional_attention = None
    documents = family.prepared(model.config)
    assert all(document.image_inputs is None or not document.image_inputs.spans for document in documents)
    loss, gradients, batch = run_packed(model, documents)
    assert batch.context.spans is None
    assert_close(loss, family.run_alone(model, num_items=batch.context.num_items))
    assert_close(gradients, take_gradients(model))


@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
def test_adapters_of_the_tower_train_under_every_policy(qwen, policy):
    model = qwen.build(lora={"r": 2, "target_modules": TOWER})
    documents = qwen.prepared(model.config)
    checkpointing = None if policy == "keep" else OffloadCheckpointing(policy)
    loss, gradients, batch = run_packed(model, documents, checkpointing=checkpointing)
    truth = qwen.run_alone(model, num_items=batch.context.num_items)
    expected = take_gradients(model)
    assert_close(loss, truth)
    assert any("visual" in name for name in gradients)
    assert_close(gradients, expected)


def test_positions_of_a_text_in_a_pack_with_images_are_those_of_text(qwen):
    documents = qwen.prepared(qwen.build().config)
    batch = collate(documents)
    assert batch["position_ids"].shape == (3, 1, batch.context.num_tokens)
    length = len(documents[0].input_ids)
    assert torch.equal(batch["position_ids"][:, 0, :length], torch.arange(length).expand(3, length))
    moved = batch.to("meta")
    assert moved["pixel_values"].device.type == moved["position_ids"].device.type == "meta"
    assert collate(documents[:1])["position_ids"].shape == (1, length)


# The second document has 27 tokens and 25 positions. The limit is between both, or below both. Alone in its pack it
# makes all documents longer than the limit in tokens, and none in positions.
@pytest.mark.parametrize(("limit", "is_alone"), [(25, False), (15, False), (25, True)])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_scaling_by_length_counts_the_positions_of_images(monkeypatch, kind, limit, is_alone):
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0 + i for i in range(8)]} if kind == "longrope" else {}
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": limit, **factors}
    monkeypatch.setattr(vision, "SECTIONS", {**vision.SECTIONS, **scaling})
    monkeypatch.setattr(vision, "TEXT", {**vision.TEXT, "max_position_embeddings": limit})
    family = Family("qwen2_5_vl")
    place = 0 if is_alone else 1
    if is_alone:
        family.rows, family.images, family.documents = family.rows[1:2], family.images[1:2], family.documents[1:2]
    model = family.build()
    documents = family.prepared(model.config)
    image = documents[place]
    num_positions, num_tokens = int(image.image_inputs.position_AT.max()) + 1, len(image.input_ids)
    assert 15 < num_positions <= 25 < num_tokens
    loss, gradients, batch = run_packed(model, documents, num_pad=0 if is_alone else 5)
    assert batch.context.position_lengths[place] == num_positions
    truth = family.run_alone(model, num_items=batch.context.num_items, before=forget_lengths)
    assert_close(loss, truth)
    assert_close(gradients, take_gradients(model))


def test_families_whose_images_are_not_served_are_refused_by_name():
    from transformers import AutoConfig

    with pytest.raises(UnsupportedModelError, match="idefics3"):
        check_images(AutoConfig.for_model("idefics3"))
