"""Images of rows: every usual form gives the same image, and what cannot be read names the row and the reason."""

import base64
import io

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image

from lightning_fastft.core.errors import DataError
from lightning_fastft.packing.images import ImageInputs, decode_image, merge_inputs, place_images, read_image
from lightning_fastft.packing.rows import rejects
from lightning_fastft.packing.rows.formats import FormatOptions
from lightning_fastft.packing.store.cache import tokenize_sources
from lightning_fastft.packing.tokens.spans import move_spans
from tests.packing.conftest import build_tokenizer
from tests.support.vision import TEMPLATE, make_image, to_bytes

IMAGE = make_image(0, 6, 4)
PIXELS = np.asarray(IMAGE)
CONTENT = to_bytes(IMAGE)


class FourTokens:
    """Expands each placeholder to as many marks as the image is high."""

    fingerprint = "four"
    chat_template = None

    def expand(self, text, images):
        parts, places, begin, shift = [], [], 0, 0
        for image in images:
            place = text.index("<s>", begin)
            parts += [text[begin:place], "<s>" * image.height]
            places.append((place, place + 3, place + shift, place + shift + 3 * image.height))
            shift += 3 * image.height - 3
            begin = place + 3
        return "".join([*parts, text[begin:]]), tuple(places)


def tokenize(data, **options):
    options = {"images": FourTokens(), **options}
    format_options = FormatOptions(
        max_tokens=options.pop("max_tokens", 256),
        **{name: options.pop(name) for name in ("loss_on", "too_long") if name in options},
    )
    tokenizer = build_tokenizer(chat_template=TEMPLATE.replace("PLACEHOLDER", "<s>"))
    return tokenize_sources(data, tokenizer=tokenizer, options=format_options, **options)


def ask(*parts, **columns):
    return {
        "messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "four"}],
        **columns,
    }


WORDS = {"type": "text", "text": "what"}


@pytest.mark.parametrize(
    "value",
    [
        "a.png",
        "file:///FOLDER/a.png",
        f"data:image/png;base64,{base64.b64encode(CONTENT).decode()}",
        CONTENT,
        list(CONTENT),
        IMAGE,
        {"bytes": CONTENT, "path": "gone.png"},
        {"bytes": None, "path": "a.png"},
        {"image_url": {"url": "a.png"}},
        {"base64": base64.b64encode(CONTENT).decode()},
    ],
    ids=["path", "file", "data", "bytes", "list", "pil", "feature", "feature-path", "openai", "base64"],
)
def test_every_form_of_an_image_is_read(tmp_path, value):
    (tmp_path / "a.png").write_bytes(CONTENT)
    value = value.replace("/FOLDER", str(tmp_path)) if isinstance(value, str) else value
    image = read_image(value, folder=str(tmp_path))
    assert np.array_equal(np.asarray(decode_image(image)), PIXELS)
    assert image.digest == read_image(CONTENT, folder="").digest


@pytest.mark.parametrize("is_opened", [False, True])
def test_a_photo_is_turned_upright(is_opened):
    exif = Image.Exif()
    # The first row of pixels is the right side of the photo.
    exif[ExifTags.Base.Orientation] = 6
    IMAGE.save(buffer := io.BytesIO(), format="PNG", exif=exif)
    value = Image.open(buffer) if is_opened else buffer.getvalue()
    found = np.asarray(decode_image(read_image(value, folder="")))
    assert np.array_equal(found, np.rot90(PIXELS, -1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode):
    image = Image.new(mode, (2, 1))
    options = {"transparency": 0} if mode == "P" else {}
    image.putpixel((1, 0), {"RGBA": (0, 0, 0, 255), "LA": (0, 255), "P": 1}[mode])
    image.save(buffer := io.BytesIO(), format="PNG", **options)
    found = np.asarray(decode_image(read_image(buffer.getvalue(), folder="")))
    assert found.shape == (1, 2, 3)
    assert (found[0, 0] == 255).all()
    assert (found[0, 1] < 2).all()


SIXTEEN_BITS = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F"])
def test_deep_images_are_scaled_to_bytes(mode, is_file):
    values = {
        "I;16": SIXTEEN_BITS,
        "I;16B": SIXTEEN_BITS.astype(">u2"),
        "I": SIXTEEN_BITS.astype(np.int32),
        "F": (SIXTEEN_BITS / 65535).astype(np.float32),
    }[mode]
    image = Image.frombytes(mode, (4, 1), values.tobytes())
    if is_file:
        image.save(buffer := io.BytesIO(), format="TIFF")
    found = np.asarray(decode_image(read_image(buffer.getvalue() if is_file else image, folder="")))
    assert found.shape == (1, 4, 3)
    assert (found == np.array([0, 1, 128, 255])[None, :, None]).all()


def test_a_png_of_16_bits_is_scaled_and_white_where_it_is_transparent():
    Image.fromarray(SIXTEEN_BITS).save(buffer := io.BytesIO(), format="PNG", transparency=257)
    found = np.asarray(decode_image(read_image(buffer.getvalue(), folder="")))
    assert found[0, :, 0].tolist() == [0, 255, 128, 255]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.array([[0, 255]], dtype=np.float32), r"floats are 0 to 255. Scale them to \[0, 1\]"),
        (np.array([[0, np.nan]], dtype=np.float32), "floats are nan"),
        (np.array([[-1, 300]], dtype=np.int32), "integers are -1 to 300. Save it with 8 or 16 bits"),
        (np.array([[0, 70000]], dtype=np.int32), "0 to 70000"),
        (np.array([[0, 200]], dtype=np.int32), "0 to 200"),
    ],
)
def test_pixels_of_an_unknown_range_reject_the_row(values, message):
    image = Image.fromarray(values)
    with pytest.raises(DataError, match=f"row 2: .*{message}"):
        tokenize([ask(WORDS), ask({"type": "image", "image": image}, WORDS)])
    image.save(buffer := io.BytesIO(), format="TIFF")
    with pytest.raises(rejects.RowRejectedError, match=message):
        decode_image(read_image(buffer.getvalue(), folder=""))


def test_damaged_exif_rejects_the_row():
    IMAGE.save(buffer := io.BytesIO(), format="PNG", exif=b"damaged")
    with pytest.raises(rejects.RowRejectedError, match="EXIF"):
        decode_image(read_image(buffer.getvalue(), folder=""))
    with pytest.raises(rejects.RowRejectedError, match="EXIF"):
        read_image(Image.open(buffer), folder="")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("https://example.org/a.png", rejects.IMAGE_URL),
        ("s3://bucket/a.png", rejects.IMAGE_URL),
        ("gone.png", rejects.IMAGE_UNREADABLE),
        ("data:image/png;base64,!", rejects.IMAGE_UNREADABLE),
        ({"path": None}, rejects.IMAGE_UNREADABLE),
        (4, rejects.WRONG_TYPE),
    ],
)
def test_what_is_no_image_is_rejected_with_its_reason(value, reason):
    with pytest.raises(rejects.RowRejectedError) as raised:
        read_image(value, folder="")
    assert raised.value.reason == reason


def test_bytes_that_are_no_image_are_rejected():
    with pytest.raises(rejects.RowRejectedError, match="unreadable"):
        decode_image(read_image(b"%!PS-Adobe-3.0 EPSF-3.0", folder=""))


@pytest.mark.parametrize(
    "row",
    [
        ask({"type": "image", "image": IMAGE}, WORDS),
        ask({"type": "image"}, WORDS, images=[IMAGE]),
        ask({"type": "image"}, WORDS, image=IMAGE),
        ask({"type": "image_url", "image_url": {"url": "data:," + base64.b64encode(CONTENT).decode()}}, WORDS),
        {
            "messages": [{"role": "user", "content": "<image>what"}, {"role": "assistant", "content": "four"}],
            "images": [IMAGE],
        },
        {
            "messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "four"}],
            "images": [IMAGE],
        },
        {
            "conversations": [{"from": "human", "value": "<image>what"}, {"from": "gpt", "value": "four"}],
            "image": IMAGE,
        },
        {
            "prompt": [{"role": "user", "content": "<image>what"}],
            "completion": [{"role": "assistant", "content": "four"}],
            "images": [IMAGE],
        },
    ],
    ids=["part", "column", "one", "openai", "mark", "no mark", "sharegpt", "prompt"],
)
def test_every_place_of_an_image_gives_the_same_example(row):
    truth = tokenize([ask({"type": "image", "image": CONTENT}, WORDS)])[0]
    found = tokenize([row])[0]
    assert found.input_ids.tolist() == truth.input_ids.tolist()
    assert found.labels.tolist() == truth.labels.tolist()
    assert np.array_equal(np.asarray(decode_image(found.images[0])), PIXELS)
    assert found.input_ids.tolist().count(3) == IMAGE.height


@pytest.mark.parametrize("loss_on", ["completion", "all"])
def test_tokens_of_images_are_never_trained(loss_on):
    turn = {"role": "assistant", "content": [{"type": "image", "image": IMAGE}, {"type": "text", "text": "four"}]}
    dataset = tokenize([{"messages": [{"role": "user", "content": "what"}, turn]}], loss_on=loss_on)
    document = dataset[0]
    assert (document.labels[document.input_ids == 3] == -100).all()
    assert (document.labels != -100).sum() >= 2


def test_spans_move_with_their_text_and_leave_images_out():
    assert move_spans([(0, 2), (3, 9)], [(1, 2, 1, 5), (4, 5, 7, 11)]) == ((0, 1), (6, 7), (11, 15))


def test_images_and_places_must_be_equal_in_number():
    messages = [{"role": "user", "content": "<image> <image>"}]
    with pytest.raises(rejects.RowRejectedError, match="fewer"):
        place_images(messages, [IMAGE])
    with pytest.raises(rejects.RowRejectedError, match="more"):
        place_images([{"role": "user", "content": "<image>"}], [IMAGE, IMAGE])


def test_a_url_stops_the_run_and_names_the_row(tmp_path):
    row = ask({"type": "image", "url": "https://example.org/a.png"}, WORDS)
    with pytest.raises(DataError, match=r"row 1: image behind a URL.*example\.org"):
        tokenize([row])


def test_images_without_a_processor_stop_the_run():
    with pytest.raises(DataError, match="images without an image processor"):
        tokenize([ask({"type": "image", "image": IMAGE}, WORDS)], images=None)


@pytest.mark.parametrize("too_long", ["truncate", "split"])
def test_examples_with_images_are_not_cut(too_long):
    data = [ask({"type": "image", "image": IMAGE}, WORDS), ask(WORDS)]
    dataset = tokenize(data, max_tokens=40, too_long=too_long, max_reject_share=0.5)
    assert rejects.IMAGE_TOO_LONG in dataset.report.rejects or len(dataset[0].input_ids) <= 40


def test_the_cache_keeps_paths_and_bytes_and_no_pixels(tmp_path):
    (tmp_path / "a.png").write_bytes(CONTENT)
    data = [
        ask({"type": "image", "path": str(tmp_path / "a.png")}, WORDS),
        ask(WORDS),
        ask({"type": "image", "image": IMAGE}),
    ]
    for _ in range(2):
        dataset = tokenize(data, cache_dir=tmp_path / "cache")
        assert [len(dataset[number].images) for number in range(3)] == [1, 0, 1]
        assert dataset[0].images[0].path == str(tmp_path / "a.png")
        assert np.array_equal(np.asarray(decode_image(dataset[2].images[0])), PIXELS)
    assert dataset.content_digest == tokenize(data).content_digest
    (tmp_path / "a.png").write_bytes(to_bytes(make_image(1, 6, 4)))
    with pytest.raises(DataError, match="changed"):
        decode_image(dataset[0].images[0])


def test_text_without_images_has_no_files_of_images(tmp_path):
    dataset = tokenize([ask(WORDS)], cache_dir=tmp_path)
    assert dataset.images is None
    assert not list(tmp_path.rglob("image*"))


def test_inputs_of_documents_are_joined_in_order_and_padded():
    first = ImageInputs({"pixels": torch.ones(1, 3, 2, 4)})
    second = ImageInputs({"pixels": torch.full((2, 3, 4, 2), 2.0)})
    merged = merge_inputs([first, second])["pixels"]
    assert merged.shape == (3, 3, 4, 4)
    assert merged[0, :, :2].eq(1).all()
    assert merged[0, :, 2:].eq(0).all()
    assert merged[1:, :, :, :2].eq(2).all()
    assert merged[1:, :, :, 2:].eq(0).all()
