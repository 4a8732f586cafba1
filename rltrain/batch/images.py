"""The images of the rows of a batch: the columns `prompt_images` and `image_files`.

`prompt_images` has, for each prompt token, the number of the image that the token shows a part of, or 0. An image's
number is a hash of its file. `image_files` holds the files of a row's images as bytes, one after another. Before each
file are the image's number and the length of the file, as 64-bit integers.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rltrain.batch.data_proto import DataProto

# Names of the two columns of images: one for the prompt tokens, and one for the files.
IMAGES = ("prompt_images", "image_files")
_INTEGER = 8  # Number of bytes of an integer.


def joined(images: Iterable[tuple[int, bytes]]) -> Tensor:
    """Return the images of a row, given as pairs (number, file), as a uint8 tensor for the column `image_files`."""
    content = bytearray()
    for number, file in images:
        content += number.to_bytes(_INTEGER, "little") + len(file).to_bytes(_INTEGER, "little") + file
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.zeros(0, dtype=torch.uint8)


def images_of(batch: DataProto) -> list[list[tuple[int, bytes]]]:
    """Return the images of each row as pairs (number, file)."""
    offsets, content = batch.offsets("image_files").tolist(), batch.values("image_files").numpy()
    return [list(_split(content[begin:end].tobytes())) for begin, end in itertools.pairwise(offsets)]


def _split(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        number, size = (int.from_bytes(content[at + k * _INTEGER :][:_INTEGER], "little") for k in (0, 1))
        at += 2 * _INTEGER + size
        yield number, content[at - size : at]


def shown_files(batch: DataProto, numbers: Tensor) -> tuple[bytes, ...]:
    """Return the files of the images that a sequence of tokens shows, in order.

    Args:
        batch: the rows to which the tokens belong.
        numbers: (N,) for each token, the number of the image that it shows a part of, or 0. The sequence contains all
            tokens of each image.
    """
    files, tokens = dict[int, bytes](), dict[int, int]()
    rows = batch.values("prompt_images").split(batch.lengths("prompts").tolist())
    for row, own in zip(rows, images_of(batch), strict=True):
        times = Counter(number for number, _ in own)
        for number, file in own:
            if number not in files:
                files[number], tokens[number] = file, int((row == number).sum()) // times[number]
    found, shown, at = list[bytes](), numbers[numbers > 0].tolist(), 0
    while at < len(shown):
        found.append(files[shown[at]])
        at += tokens[shown[at]]
    assert at == len(shown), "a pack must hold all tokens of each image"
    return tuple(found)
