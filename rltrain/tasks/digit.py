"""Task: name the digit that is drawn in a picture.

The prompt shows a picture of 28 x 28 pixels with one digit in seven segments, as in `<image>?` -> `7`. The place, the
size, the brightness and the width of the strokes vary, and the picture is noisy. The starting model can see the digit,
but often names another one.
"""

import io
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from rltrain.tasks.base import SPLITS, Example, split_of

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import Idefics3Processor, Qwen2Tokenizer

SIZE = 28  # Width and height of a picture, in pixels.
SLIP_SHARE = 0.4  # Share of flawed answers that are a random digit.
QUESTION = "?"
# The segments of the digits: a (top), b and c (right), d (bottom), e and f (left), g (middle).
SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
# The ends of each segment, as (x, y) of the start and of the end; x is from 0 to 1, and y from 0 to 2.
_LINES = {
    "a": (0, 0, 1, 0),
    "b": (1, 0, 1, 1),
    "c": (1, 1, 1, 2),
    "d": (0, 2, 1, 2),
    "e": (0, 1, 0, 2),
    "f": (0, 0, 0, 1),
    "g": (0, 1, 1, 1),
}


def draw(digit: int, rng: Random) -> "Image":
    """Return a grey picture of a digit."""
    from PIL import Image, ImageDraw

    dark = rng.randrange(0, 60)
    picture = Image.new("L", (SIZE, SIZE), dark)
    width, height = rng.uniform(8, 10), rng.uniform(7, 8.5)  # The digit is twice as high as `height`.
    left, top = (SIZE - width) / 2 + rng.uniform(-2, 2), SIZE / 2 - height + rng.uniform(-1, 1)
    slant, bright, stroke = rng.uniform(-0.05, 0.1), rng.randrange(150, 256), rng.choice((2, 3))
    pen = ImageDraw.Draw(picture)
    for segment in SEGMENTS[digit]:
        ends = (_LINES[segment][:2], _LINES[segment][2:])
        points = [(left + x * width + (1 - y) * slant * height, top + y * height) for x, y in ends]
        pen.line(points, fill=bright, width=stroke)
    noise = Image.frombytes("L", picture.size, rng.randbytes(SIZE * SIZE))
    return Image.blend(picture, noise, 0.1)


@dataclass(frozen=True)
class PictureTask:
    """A task whose prompts show a picture.

    Attributes:
        name: key in `rltrain.tasks.TASKS`.
        reward: import path `module:function` of the task's reward function.
        max_prompt_length: number of tokens in a prompt, including those of the picture.
        max_response_length: suggested limit on the length of a response in tokens, including the end token.
        examples_per_step: number of flawed answers in one optimizer step when the starting model is trained.
        model: value of the config key `model.path` that names the task's starting model.
    """

    name: str
    reward: str
    max_prompt_length: int
    max_response_length: int
    examples_per_step: int = 64
    model: str = "builtin-vision"

    def prompts(self, split: str, seed: int, count: int) -> list[dict[str, Any]]:
        """Draw `count` rows `{"prompt": [message with a picture and a text], "answer": digit}`.

        With the same seed, a call with a smaller `count` returns the first rows of a call with a larger `count`. The
        two splits never share a picture, because a hash of a picture decides its split.

        Raises:
            ValueError: the split is unknown, or `count` is below 0.
        """
        if split not in SPLITS:
            raise ValueError(f"split={split!r}: a built-in task has the splits {', '.join(SPLITS)}")
        if count < 0:
            raise ValueError(f"count={count}: the number of rows must be at least 0")
        rng, rows = Random(f"{self.name}/{split}/{seed}"), list[dict[str, Any]]()
        while len(rows) < count:
            digit, buffer = rng.randrange(10), io.BytesIO()
            draw(digit, rng).save(buffer, format="PNG")
            if split_of(buffer.getvalue().hex()) == split:
                parts = [{"type": "image", "image": buffer.getvalue()}, {"type": "text", "text": QUESTION}]
                rows.append({"prompt": [{"role": "user", "content": parts}], "answer": str(digit)})
        return rows

    def tokenizer(self) -> "Qwen2Tokenizer":
        """Build the task's tokenizer, which has a chat template for messages with images."""
        from rltrain.tasks.vision_processor import vision_tokenizer

        return vision_tokenizer()

    def processor(self) -> "Idefics3Processor":
        """Build the processor of the task's model, which prepares images and inserts their tokens into prompts."""
        from rltrain.tasks.vision_processor import vision_processor

        return vision_processor()

    def examples(self, tokenizer: "Qwen2Tokenizer", rng: Random, size: int) -> list[Example]:
        """Draw `size` random prompts with flawed answers for supervised training."""
        processor, found = self.processor(), []
        rows = self.prompts("train", rng.getrandbits(64), size)
        files = [row["prompt"][0]["content"][0]["image"] for row in rows]
        made = processor(text=processor.image_token + QUESTION, images=[picture_of(files[0])], add_special_tokens=False)
        prompt = [int(token) for token in made["input_ids"][0]]  # All pictures have the same number of tokens.
        for row, file in zip(rows, files, strict=True):
            answer = str(rng.randrange(10)) if rng.random() < SLIP_SHARE else row["answer"]
            ids = [*prompt, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
            found.append(Example(ids, [place >= len(prompt) for place in range(len(ids))], image=file))
        return found


def picture_of(file: bytes) -> "Image":
    """Return the picture in a PNG file in RGB."""
    from PIL import Image

    with Image.open(io.BytesIO(file)) as picture:
        return picture.convert("RGB")


DIGIT = PictureTask(
    name="digit",
    reward="rltrain.rewards.final_answer:exact_answer",
    max_prompt_length=8,
    max_response_length=4,
)
