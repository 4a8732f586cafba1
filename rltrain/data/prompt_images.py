"""Reads the images of prompts from rows of data, and inserts the tokens of images into prompts.

The images of a row are in the row's messages, in the column `images` (a list) or in the column `image` (one image). A
part of a message is `{"type": "text", "text": TEXT}`, `{"type": "image", "image": IMAGE}`, or
`{"type": "image_url", "image_url": {"url": IMAGE}}`. A part `{"type": "image"}` without an image stands for the next
image of the column, and so does the mark `<image>` in a text. If no message has a place for an image, the images of the
column come before the text of the first user message.

An image is the path of a file, a `data:` URI, the bytes of an image file, or a dict with `bytes` or `path` as in data
sets of the Hugging Face hub.

A language model sees an image as a sequence of tokens. A chat template writes one placeholder token for each image. The
model's processor replaces the placeholder by the tokens of the image, whose number can depend on the image's width and
height. `short ids` are the token ids of a prompt before this replacement.
"""

import base64
import binascii
import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rltrain.base.errors import ConfigError, one_line
from rltrain.data.row_error import RowError

MARK = "<image>"
IMAGE_COLUMNS = ("images", "image")
_FORMS = "an image is the path of a file, a data: URI, the bytes of a file, or {'bytes': ..., 'path': ...}"


class ImageInfo(NamedTuple):
    """The number and the size of an image.

    Attributes:
        number: positive 63-bit hash of the image's file. Different files have different numbers.
        width: width in pixels.
        height: height in pixels.
    """

    number: int
    width: int
    height: int


@dataclass(frozen=True)
class PromptImages:
    """The images of a prompt.

    Attributes:
        files: pairs (number, content of the file) of the images, in the order in which the prompt shows them.
        short_ids: token ids of the prompt with one placeholder token for each image.
        numbers: for each token of the prompt, the number of the image that the token shows a part of; 0 for a token
            that shows no part of an image.
    """

    files: tuple[tuple[int, bytes], ...]
    short_ids: Sequence[int]
    numbers: Sequence[int]


def decoded(file: bytes) -> Any:
    """Return the image in a file as a PIL image in RGB, turned upright as the camera says (EXIF).

    All parts of rltrain decode images with this function, so that engines and training ranks see the same pixels.
    """
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(file)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def image_info(file: bytes) -> ImageInfo:
    """Return the number and the size of an image.

    Raises:
        RowError: the file is not a complete image.
    """
    try:
        width, height = decoded(file).size
    except Exception as error:  # PIL raises exceptions of many types for broken files.
        reason = one_line(" ".join(str(error).split()), 100)
        raise RowError(f"an image cannot be decoded ({type(error).__name__}: {reason})") from None
    return ImageInfo(image_number(file), width, height)


def image_number(file: bytes) -> int:
    """Return the number that identifies an image: a hash of the image's file, from 1 to 2**63 - 1."""
    digest = hashlib.blake2b(file, digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1) or 1


def read_image(value: Any, folder: Path) -> bytes:
    """Return the content of the file of an image.

    Args:
        value: the image, in one of the forms that the docstring of this module lists.
        folder: folder to which the paths of images are relative: that of the data file, or the working directory if
            the data is not in a file.

    Raises:
        RowError: `value` is not an image, or the image's file cannot be read.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping) and ("bytes" in value or "path" in value):
        return read_image(value["bytes"] if value.get("bytes") else value.get("path"), folder)
    if isinstance(value, Mapping) and "url" in value:
        return read_image(value["url"], folder)
    if isinstance(value, str):
        return _from_uri(value) if value.startswith("data:") else _from_file(value, folder)
    raise RowError(f"an image has the type {type(value).__name__}; {_FORMS}")


def _from_uri(uri: str) -> bytes:
    head, _, content = uri.partition(",")
    if not head.endswith(";base64"):
        raise RowError("the data: URI of an image is not in base64; write data:image/png;base64,...")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise RowError(f"the data: URI of an image is not valid base64 ({error})") from None


def _from_file(name: str, folder: Path) -> bytes:
    if name.startswith(("http://", "https://")):
        raise RowError(f"the image {one_line(name, 60)} is on the network; download it and give its path")
    path = folder / name.removeprefix("file://")
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise RowError(
            f"the image {one_line(str(path), 120)} cannot be read ({reason}); give its path, which is relative to the "
            "data file, or to the working directory if the data is not in a file"
        ) from None


def separated(prompt: Any, column: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Separate the messages of a prompt from the prompt's images.

    Args:
        prompt: chat messages, or anything else, which is returned unchanged.
        column: the images of the row's column.

    Returns:
        Two values: the messages, in which each part that shows an image is `{"type": "image"}`, and the images in the
        order of these parts. The content of a message with images is a list of parts. Other messages are unchanged.

    Raises:
        RowError: the number of places for images differs from the number of images, or a part has an unknown type.
    """
    if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
        if column:
            raise RowError(
                "a prompt with images must be chat messages, and this prompt is text; use a model whose tokenizer has "
                "a chat template, with data.chat=always"
            )
        return prompt, []
    places = _Places(column)
    messages = [{**message, "content": places.parts(message.get("content"))} for message in prompt]
    if places.left and not places.images:
        first = next((message for message in messages if message.get("role") == "user"), None)
        if first is None or not isinstance(first["content"], str | list):
            raise RowError("the row has images, but no user message that could show them")
        first["content"] = [*({"type": "image"} for _ in places.left), *parts_of(first["content"])]
        return messages, places.left
    if places.left:
        raise RowError(
            f"the column of images holds {len(column)} images, but the messages have places for only {places.marks} of "
            f"them; write one {MARK} for each image"
        )
    return messages, places.images


def parts_of(content: Any) -> Any:
    """Return the content of a message as a list of parts. Content that is neither text nor a list is unchanged."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def in_parts(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return chat messages with the content of each message as a list of parts."""
    return [{**message, "content": parts_of(message["content"])} for message in chat]


def texts_of(prompt: Any) -> list[str]:
    """Return the texts of a prompt: the prompt itself if it is text, or the texts of its chat messages."""
    if isinstance(prompt, str):
        return [prompt]
    found: list[str] = []
    for message in prompt:
        content = message["content"]
        parts = [content] if isinstance(content, str) else [part.get("text") for part in content]
        found += [text for text in parts if isinstance(text, str)]
    return found


class _Places:
    """Finds the places of images in the messages of a prompt.

    Attributes:
        left: images of the column that have no place yet.
        marks: number of places that took an image from the column.
        images: images in the order of their places.
    """

    def __init__(self, column: Sequence[Any]) -> None:
        self.left, self.marks, self.images = list(column), 0, list[Any]()
        self._has_column = bool(column)

    def parts(self, content: Any) -> Any:
        """Return the content of a message without the data of images: a list of parts if the message has images."""
        if isinstance(content, str):
            found = self._text(content)
            return content if found == parts_of(content) else found
        if not isinstance(content, list):
            return content
        return [part for one in content for part in self._part(one)]

    def _part(self, part: Any) -> list[dict[str, Any]]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return self._text(part["text"])
        if kind == "image" and not any(part.get(name) for name in ("image", "path", "url", "bytes")):
            return self._next()
        if kind == "image":
            self.images.append(part.get("image") or part.get("bytes") or part.get("path") or part.get("url"))
            return [{"type": "image"}]
        if kind == "image_url":
            self.images.append(part.get("image_url"))
            return [{"type": "image"}]
        raise RowError(
            f"a message has the part {one_line(repr(part), 80)}; write parts as {{'type': 'text', 'text': ...}} or "
            "{'type': 'image', 'image': ...}"
        )

    def _text(self, text: str) -> list[dict[str, Any]]:
        """Return a text as a list of parts.

        If the row has a column of images, each mark `<image>` in the text becomes the next image of the column.
        """
        pieces = text.split(MARK) if self._has_column else [text]
        found: list[dict[str, Any]] = []
        for number, piece in enumerate(pieces):
            found += self._next() if number else []
            found += parts_of(piece) if piece or len(pieces) == 1 else []
        return found

    def _next(self) -> list[dict[str, Any]]:
        if not self.left:
            raise RowError(
                "the messages have more places for images than the row has images; put an image into each part "
                "{'type': 'image', 'image': ...}, or into the column images"
            )
        self.marks += 1
        self.images.append(self.left.pop(0))
        return [{"type": "image"}]


class ImagePlaceholders:
    """Replaces the placeholder tokens of prompts by the tokens of images, as a model's processor does.

    Args:
        processor: processor of transformers, with an image processor and a tokenizer.

    Attributes:
        token: id of the token that the model replaces by a part of an image.
    """

    def __init__(self, processor: Any) -> None:
        self._processor, self.token = processor, int(processor.image_token_id)
        self._known: dict[tuple[int, int], list[int]] = {}  # Maps (width, height) to the tokens of an image.

    def _tokens(self, width: int, height: int) -> list[int]:
        """Return the tokens of an image of the given size in pixels. The pixels do not matter."""
        from PIL import Image

        if (width, height) not in self._known:
            blank = Image.new("RGB", (width, height))
            try:
                made = self._processor(text=self._processor.image_token, images=[blank], add_special_tokens=False)
            except Exception as error:  # An incomplete processor causes exceptions of many types.
                reason = one_line(" ".join(str(error).split()), 120)
                raise ConfigError(
                    f"model.path: the model's processor fails for an image of {width} x {height} pixels "
                    f"({type(error).__name__}: {reason}); use the processor files that belong to the model"
                ) from error
            self._known[width, height] = [int(token) for token in made["input_ids"][0]]
        return self._known[width, height]

    def length(self, short_ids: Sequence[int], images: Sequence[ImageInfo]) -> int:
        """Return the number of tokens of a prompt after the replacement."""
        return len(short_ids) + sum(len(self._tokens(one.width, one.height)) - 1 for one in images)

    def largest(self) -> int:
        """Return the largest token id in the tokens of the images so far, or 0."""
        return max((max(tokens) for tokens in self._known.values() if tokens), default=0)

    def places(self, short_ids: Sequence[int]) -> int:
        """Return the number of placeholder tokens of a prompt."""
        return sum(token == self.token for token in short_ids)

    def replaced(self, short_ids: Sequence[int], images: Sequence[ImageInfo]) -> tuple[list[int], list[int]]:
        """Replace the placeholder tokens of a prompt.

        Returns:
            The token ids of the prompt, and `PromptImages.numbers`.
        """
        ids, numbers, rest = list[int](), list[int](), iter(images)
        for token in short_ids:
            image = next(rest) if token == self.token else None
            tokens = [token] if image is None else self._tokens(image.width, image.height)
            ids += tokens
            numbers += [0 if image is None or one != self.token else image.number for one in tokens]
        return ids, numbers
