"""Tests of the task whose prompts show a picture, and of its starting model."""

import io
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

from rltrain.data.prompt_images import ImagePlaceholders, decoded
from rltrain.tasks import TASKS
from rltrain.tasks.digit import SEGMENTS, SIZE, draw, picture_of
from rltrain.tasks.tiny_model import IGNORED, make_start, messy_batch
from rltrain.tasks.tokenizer import EOS_ID
from rltrain.tasks.vision_processor import IMAGE_ID

DIGIT = TASKS["digit"]


def file_of(row):
    return row["prompt"][0]["content"][0]["image"]


def test_rows_show_a_picture_and_ask_for_its_digit():
    rows = DIGIT.prompts("train", 0, 200)
    assert Counter(len(row["prompt"]) for row in rows) == {1: 200}
    assert set(Counter(row["answer"] for row in rows)) == set("0123456789")
    assert len({file_of(row) for row in rows}) == 200
    assert {Image.open(io.BytesIO(file_of(row))).size for row in rows} == {(SIZE, SIZE)}


def test_rows_depend_on_the_seed_alone_and_the_splits_share_none():
    assert DIGIT.prompts("train", 3, 5) == DIGIT.prompts("train", 3, 9)[:5]
    files = [{file_of(row) for row in DIGIT.prompts(split, seed, 100)} for split in ("train", "val") for seed in (0, 1)]
    assert len(set.union(*files)) == 400


@pytest.mark.parametrize(("split", "count", "said"), [("test", 1, "the splits train, val"), ("val", -1, "at least 0")])
def test_wrong_arguments_are_refused(split, count, said):
    with pytest.raises(ValueError, match=said):
        DIGIT.prompts(split, 0, count)


def test_the_picture_of_a_digit_is_bright_along_its_segments():
    """Without noise, the mean picture of a digit is brightest where its segments are, so other digits fit it worse."""
    means = [np.mean([np.asarray(draw(digit, Random(n)), dtype=float) for n in range(60)], 0) for digit in range(10)]
    for digit in range(10):
        seen = np.mean([np.asarray(draw(digit, Random(n)), dtype=float) for n in range(100, 160)], 0)
        fits = [np.corrcoef(seen.ravel(), mean.ravel())[0, 1] for mean in means]
        assert int(np.argmax(fits)) == digit
    assert len({frozenset(one) for one in SEGMENTS}) == 10


def test_a_prompt_has_as_many_tokens_as_the_task_says():
    placeholders = ImagePlaceholders(DIGIT.processor())
    assert placeholders.length([IMAGE_ID, ord("?")], [(1, SIZE, SIZE)][:0]) == 2
    example = DIGIT.examples(DIGIT.tokenizer(), Random(0), 1)[0]
    assert example.trained.count(False) == DIGIT.max_prompt_length
    assert list(example.ids).count(IMAGE_ID) == 4
    assert example.ids[-1] == EOS_ID


def test_flawed_answers_are_often_right_and_otherwise_any_digit():
    rows = DIGIT.prompts("train", Random(5).getrandbits(64), 400)
    examples = DIGIT.examples(DIGIT.tokenizer(), Random(5), 400)
    assert [example.image for example in examples] == [file_of(row) for row in rows]
    right = sum(chr(example.ids[-2]) == row["answer"] for example, row in zip(examples, rows, strict=True))
    assert 0.55 < right / 400 < 0.73


def test_the_starting_model_is_trained_on_pictures_and_saved_with_its_processor(tmp_path):
    (rows,) = messy_batch(DIGIT, DIGIT.tokenizer(), Random(0), 6)
    assert len(rows.images) == 6
    assert rows.ids.shape == (6, DIGIT.max_prompt_length + 2)
    assert (rows.labels[:, : DIGIT.max_prompt_length] == IGNORED).all()
    before = torch.get_rng_state()
    path = make_start(DIGIT, tmp_path / "start", seed=0, steps=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert {"model.safetensors", "processor_config.json", "tokenizer.json"} <= {file.name for file in path.iterdir()}


def test_pictures_are_read_as_the_engines_read_them():
    file = file_of(DIGIT.prompts("val", 0, 1)[0])
    assert np.array_equal(np.asarray(picture_of(file)), np.asarray(decoded(file)))
