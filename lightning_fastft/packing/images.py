"""Images of rows: find them in the forms of the usual data sets, keep their encoded bytes, decode them.

A data set keeps images as files, as bytes, as base64 text, as dicts of both (the Image feature of datasets) or as PIL
images; messages name them in parts, or mark their places while a column holds them.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np

from lightning_fastft.core.errors import DataError, MissingDependencyError, ShapeError
from lightning_fastft.core.extras import pip_line
from lightning_fastft.packing.rows.messages import IMAGE_PARTS
from lightning_fastft.packing.rows.rejects import IMAGE_COUNT, IMAGE_UNREADABLE, IMAGE_URL, WRONG_TYPE, RowRejectedError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

# Marks the place of an image in a text, in data sets that hold images in a column (LLaVA, ShareGPT).
PLACEHOLDER = "<image>"
# Decoders without programs of their own: EPS would start an interpreter.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# Modes that PNG keeps without loss.
_LOSSLESS = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
# Keys of a part or of a dict that hold its image.
_IMAGE_KEYS = ("bytes", "image", "base64", "image_url", "path", "url")
_DIGEST_BYTES = 16
_IN_FILE, _HELD = 0, 1


class ImageFile(NamedTuple):
    """One image in encoded form: the path of its file, or its bytes; and the digest of these bytes."""

    path: str
    content: bytes
    digest: bytes


class ImageInputs(NamedTuple):
    """What the images of one document become for a model.

    tensors: Keyword arguments of the model, each with images or patches along its first axis.
    position_AT: Positions of the document's tokens, shape (axes, length); None if they are those of text.
    spans: First token and one past the last of each image whose tokens see each other in both directions.
    in_windows_only: As ``BidirectionalSpans``.
    """

    tensors: Mapping[str, torch.Tensor]
    position_AT: torch.Tensor | None = None
    spans: tuple[tuple[int, int], ...] = ()
    in_windows_only: bool = False


class ImageStore:
    """The images of a data set, in memory or memory-mapped.

    Args:
        arrays: images: for each image one byte for its kind, its digest, and its path or bytes. image_start: where each
            image begins in it, and its length. first_image: number of the first image of each example, and the number
            of images.
    """

    # Dtype of each file of a folder.
    DTYPES = {"images": np.uint8, "image_start": np.int64, "first_image": np.int64}

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = dict(arrays)
        self._payload_B, self._start_M1, self._first_N1 = (self.arrays[name] for name in self.DTYPES)

    def __getitem__(self, example: int) -> tuple[ImageFile, ...]:
        return tuple(self._read(image) for image in range(self._first_N1[example], self._first_N1[example + 1]))

    def check_bounds(self, *, num_examples: int) -> None:
        """Raise DataError if offsets are inconsistent, which would cause reads out of bounds."""
        for offsets, num_offsets, end in (
            (self._first_N1, num_examples + 1, len(self._start_M1) - 1),
            (self._start_M1, None, len(self._payload_B)),
        ):
            if num_offsets not in (None, len(offsets)) or offsets[0] != 0 or offsets[-1] != end:
                raise DataError("its images have impossible offsets")
            if bool((np.diff(offsets) < 0).any()):
                raise DataError("its images have descending offsets")

    def _read(self, image: int) -> ImageFile:
        record = self._payload_B[self._start_M1[image] : self._start_M1[image + 1]].tobytes()
        digest, rest = record[1 : 1 + _DIGEST_BYTES], record[1 + _DIGEST_BYTES :]
        return ImageFile("", rest, digest) if record[0] == _HELD else ImageFile(rest.decode(), b"", digest)


def write_images(file: IO[bytes], images: Sequence[ImageFile]) -> list[int]:
    """Append images to the payload of an ImageStore, and return the bytes of each."""
    sizes = []
    for image in images:
        kind, rest = (_IN_FILE, image.path.encode()) if image.path else (_HELD, image.content)
        sizes.append(file.write(bytes([kind]) + image.digest + rest))
    return sizes


def find_image_offsets(size_M: Sequence[int], *, count_N: Sequence[int]) -> dict[str, np.ndarray]:
    """Return the other arrays of an ImageStore by name, from the bytes of each image and the number of images of each
    example; none if there is no image.
    """
    if not size_M:
        return {}
    return {
        "image_start": np.cumsum([0, *size_M], dtype=np.int64),
        "first_image": np.cumsum([0, *count_N], dtype=np.int64),
    }


def place_images(
    messages: Sequence[dict[str, Any]], column: Sequence[object]
) -> tuple[list[dict[str, Any]], list[object]]:
    """Return messages with a part ``{"type": "image"}`` at the place of each image, and the images in this order.

    Args:
        messages: Checked messages; content is a string, or a list of parts if one of them is an image.
        column: Images of the row's column. They belong to parts without an image of their own, or to the marks
            ``<image>`` in texts; without any of these they come before the text of the first user turn.

    Raises:
        RowRejectedError: There are more or fewer images than places.
    """
    waiting = list(column)
    found: list[object] = []
    has_bare_parts = any(_is_bare(part) for message in messages for part in _parts(message))
    turns = [_place(message, waiting, found, splits=bool(column) and not has_bare_parts) for message in messages]
    if waiting and not found:
        first = next((number for number, turn in enumerate(turns) if turn["role"] == "user"), None)
        if first is not None:
            parts = [*({"type": "image"} for _ in waiting), *_parts(turns[first])]
            turns[first] = {**turns[first], "content": parts}
            found, waiting = waiting, []
    if waiting:
        raise RowRejectedError(IMAGE_COUNT, f"the row has {len(column)} images, {len(waiting)} more than places")
    return turns, found


def _place(message: dict[str, Any], waiting: list[object], found: list[object], *, splits: bool) -> dict[str, Any]:
    """Take the images of one message, in order; the images of the column leave ``waiting``."""
    parts: list[dict[str, Any]] = []
    for part in _parts(message):
        if part["type"] == "text":
            pieces = str(part["text"]).split(PLACEHOLDER) if splits else [part["text"]]
            for number, piece in enumerate(pieces):
                if number:
                    found.append(_next(waiting))
                    parts.append({"type": "image"})
                if piece:
                    parts.append({"type": "text", "text": piece})
        else:
            found.append(_next(waiting) if _is_bare(part) else part)
            parts.append({"type": "image"})
    return {**message, "content": parts} if any(part["type"] == "image" for part in parts) else message


def _next(waiting: list[object]) -> object:
    if not waiting:
        raise RowRejectedError(IMAGE_COUNT, "the row has fewer images than places")
    return waiting.pop(0)


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _is_bare(part: Mapping[str, Any]) -> bool:
    """Whether a part marks the place of an image and names none."""
    return part["type"] in IMAGE_PARTS and not any(part.get(name) is not None for name in _IMAGE_KEYS)


def read_image(value: object, *, folder: str) -> ImageFile:
    """Return an image of a row in its encoded form.

    The value is a path, relative to the folder, a ``file:`` or ``data:`` URL, encoded bytes, a PIL image, or a dict
    with one of these under image, path, url, bytes, base64 or image_url.

    Raises:
        RowRejectedError: There is no such file, it is another URL, or the value is no image.

    Cost:
        One read of the file.
    """
    if isinstance(value, Mapping):
        # The Image feature of datasets keeps bytes beside the name of the file that they came from.
        for name in _IMAGE_KEYS:
            if value.get(name) is not None:
                entry = value[name]
                return read_image(f"data:;base64,{entry}" if name == "base64" else entry, folder=folder)
        raise RowRejectedError(IMAGE_UNREADABLE, f"an image has none of {', '.join(_IMAGE_KEYS)}")
    if isinstance(value, str):
        return _read_path(value, folder=folder)
    if isinstance(value, (bytes, bytearray)):
        return _hold(bytes(value))
    if isinstance(value, list) and value and all(type(byte) is int and 0 <= byte < 256 for byte in value):
        return _hold(bytes(value))
    if hasattr(value, "tobytes") and hasattr(value, "mode"):
        return _hold(_to_png(value))
    raise RowRejectedError(
        WRONG_TYPE, f"an image must be a path, bytes, a dict or a PIL image, got {type(value).__name__}"
    )


def _read_path(value: str, *, folder: str) -> ImageFile:
    scheme = urlsplit(value).scheme if "://" in value or value.startswith("data:") else ""
    if scheme == "data":
        try:
            return _hold(base64.b64decode(value.partition(",")[2], validate=True))
        except (binascii.Error, ValueError) as error:
            raise RowRejectedError(IMAGE_UNREADABLE, f"base64 text of an image: {error}") from None
    if scheme not in ("", "file"):
        raise RowRejectedError(IMAGE_URL, f"{value[:120]}; download it and give its path")
    path = Path(folder, unquote(urlsplit(value).path) if scheme else os.path.expanduser(value)).absolute()
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise RowRejectedError(IMAGE_UNREADABLE, f"{path}: {error}") from None
    return ImageFile(str(path), b"", _digest(content))


def _hold(content: bytes) -> ImageFile:
    return ImageFile("", content, _digest(content))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _to_png(image: Any) -> bytes:
    buffer, image = io.BytesIO(), _turn_upright(image, name="a PIL image")
    if image.mode not in _LOSSLESS:
        image = _scale_to_bytes(image, name="a PIL image").convert("RGB")
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def decode_image(image: ImageFile) -> Image:
    """Return the decoded image in RGB: upright, as its EXIF orientation says, and on white where it is transparent.

    Upright is as in load_image of transformers and the Image feature of datasets, white as in the image processors of
    transformers (load_image drops transparency). Unlike them, it scales images of 16 bits and of floats in [0, 1] to 8
    bits; PIL would clip them.

    Raises:
        MissingDependencyError: Pillow is not installed.
        RowRejectedError: The bytes are not an image, or its values have no known range.
        DataError: The file changed since the data was tokenised.

    Cost:
        Reads and decodes the file: some ten milliseconds for a megapixel.
    """
    try:
        import PIL.Image
    except ImportError as error:
        raise MissingDependencyError(f"Images need Pillow. Install it with: {pip_line('vision')}") from error
    content = image.content
    if image.path:
        try:
            content = Path(image.path).read_bytes()
        except OSError as error:
            raise DataError(f"The image {image.path} cannot be read: {error}") from error
        if _digest(content) != image.digest:
            raise DataError(
                f"The image {image.path} changed since the data was tokenised, so it may have another number of "
                "tokens. Put it back, or tokenise again: with another cache_dir, or after a change of the data file."
            )
    try:
        decoded = PIL.Image.open(io.BytesIO(content), formats=_FORMATS)
        decoded.load()
    except (OSError, ValueError, SyntaxError, EOFError, PIL.Image.DecompressionBombError) as error:
        raise RowRejectedError(IMAGE_UNREADABLE, f"{image.path or 'bytes'}: {error}") from None
    upright = _scale_to_bytes(_turn_upright(decoded, name=image.path or "bytes"), name=image.path or "bytes")
    if "A" not in upright.getbands() and "transparency" not in upright.info:
        return upright.convert("RGB")
    white = PIL.Image.new("RGBA", upright.size, "white")
    return PIL.Image.alpha_composite(white, upright.convert("RGBA")).convert("RGB")


def _scale_to_bytes(image: Image, *, name: str) -> Image:
    """Return an image of 16-bit integers, or of floats in [0, 1], with 8 bits per pixel; others as they are.

    Raises:
        RowRejectedError: Its values have another range, or one that could be 8 bits as well as 16.
    """
    import PIL.Image

    if image.mode != "F" and not image.mode.startswith("I"):
        return image
    values = np.asarray(image)
    low, high = (values.min(), values.max()) if values.size else (0, 0)
    if image.mode == "F":
        # False for NaN too.
        if not (low >= 0 and high <= 1):
            raise RowRejectedError(
                IMAGE_UNREADABLE, f"{name}: its floats are {low:g} to {high:g}. Scale them to [0, 1], or save 8 bits"
            )
        return PIL.Image.fromarray(np.rint(values * 255.0).astype(np.uint8))
    if image.mode == "I" and (low < 0 or high > 65535 or 0 < high < 256):
        raise RowRejectedError(
            IMAGE_UNREADABLE, f"{name}: its 32-bit integers are {low} to {high}. Save it with 8 or 16 bits"
        )
    scaled = np.rint(values / 257.0).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        scaled[values == transparent] = 255
    return PIL.Image.fromarray(scaled)


def _turn_upright(image: Image, *, name: str) -> Image:
    """Return an image turned as its EXIF orientation says, without it."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except (OSError, ValueError, SyntaxError, EOFError, TypeError, struct.error) as error:
        raise RowRejectedError(IMAGE_UNREADABLE, f"{name}: its EXIF data: {error}") from None


def merge_inputs(inputs: Sequence[ImageInputs]) -> dict[str, torch.Tensor]:
    """Return the tensors of several documents joined along their first axis, in the order of the documents.

    Further axes are padded with zeros at their end to the largest size, as processors pad images of one batch.

    Raises:
        ShapeError: Documents have tensors of other names or ranks.
    """
    # Here and below, because processes that tokenise do without torch.
    import torch

    names = list(inputs[0].tensors)
    merged = {}
    for name in names:
        tensors = [one.tensors[name] for one in inputs if name in one.tensors]
        if len(tensors) != len(inputs) or len({tensor.ndim for tensor in tensors}) > 1:
            raise ShapeError(f"Documents of one pack have different image inputs: {name!r} is not alike in all.")
        largest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors))]
        merged[name] = torch.cat([_pad(tensor, largest) for tensor in tensors])
    if any(set(one.tensors) != set(names) for one in inputs):
        raise ShapeError(f"Documents of one pack have different image inputs than {', '.join(names)}.")
    return merged


def _pad(tensor: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    missing = [size - own for size, own in zip(sizes, tensor.shape[1:])]
    if not any(missing):
        return tensor
    from torch.nn.functional import pad

    return pad(tensor, [side for size in reversed(missing) for side in (0, size)])


def image_column(row: Mapping[str, Any]) -> list[object]:
    """Return the images of a row's columns, images before image."""
    images = row.get("images")
    several = list(images) if isinstance(images, (list, tuple)) else [] if images is None else [images]
    return several + ([row["image"]] if row.get("image") is not None else [])
