"""Tests of prompts with images: where rows hold images, how images are read, and which tokens stand for them."""

import base64
import io

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from rltrain.base.errors import ConfigError
from rltrain.data.image_models import takes_images, why_no_images
from rltrain.data.prompt_images import ImagePlaceholders, decoded, image_info, read_image, separated, texts_of
from rltrain.data.row_error import RowError
from rltrain.tasks.vision_processor import IMAGE_ID, vision_processor
from tests.image_models import picture
from tests.prompt_loading import error_of, jsonl, load

PNG, JPEG = picture(1), picture(2, width=40, height=20, kind="JPEG")
AROUND = [5, 7, *[IMAGE_ID] * 4, 5]  # What the processor of the tiny model writes for an image.


def ids(text):
    return [ord(character) for character in text]


def loaded(source, **changes):
    processor = vision_processor()
    return load(source, processor.tokenizer, placeholders=ImagePlaceholders(processor), **changes)


def refusal(source, **changes):
    with pytest.raises(ConfigError) as caught:
        loaded(source, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.jpg").write_bytes(JPEG)
    return tmp_path


def user(*parts):
    return [{"role": "user", "content": list(parts)}]


def text(words):
    return {"type": "text", "text": words}


SHOWN = {
    "a part with a path": user(text("what is "), {"type": "image", "image": "a.png"}, text("?")),
    "a part with the key path": user(text("what is "), {"type": "image", "path": "a.png"}, text("?")),
    "a part with an URL in OpenAI's form": user(
        text("what is "),
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}},
        text("?"),
    ),
    "a file URL": user(text("what is "), {"type": "image_url", "image_url": {"url": "file://a.png"}}, text("?")),
}


@pytest.mark.parametrize("form", SHOWN)
def test_an_image_in_a_message_becomes_its_tokens(folder, form):
    prompt = loaded(jsonl(folder, {"prompt": SHOWN[form], "answer": "x"}))[0]
    assert prompt.ids == [*ids("what is "), *AROUND, *ids("?")]
    assert prompt.images.short_ids == [*ids("what is "), IMAGE_ID, *ids("?")]
    number = image_info(PNG).number
    assert prompt.images.files == ((number, PNG),)
    assert prompt.images.numbers == [number if one == IMAGE_ID else 0 for one in prompt.ids]
    assert prompt.messages == user(text("what is "), {"type": "image"}, text("?"))
    assert prompt.columns == {"answer": "x"}


ROWS = {
    "marks in text": {"prompt": "<image> or <image>?", "images": ["a.png", "b.jpg"]},
    "marks in a message": {
        "messages": [{"role": "user", "content": "<image> or <image>?"}],
        "images": ["a.png", "b.jpg"],
    },
    "marks in a question": {"question": "<image> or <image>?", "images": ["a.png", "b.jpg"]},
    "parts without an image": {
        "prompt": user({"type": "image"}, text(" or "), {"type": "image"}, text("?")),
        "images": ["a.png", "b.jpg"],
    },
    "one part with an image and one without": {
        "prompt": user({"type": "image", "image": "a.png"}, text(" or "), {"type": "image"}, text("?")),
        "image": "b.jpg",
    },
}


@pytest.mark.parametrize("form", ROWS)
def test_images_of_a_column_take_their_places_in_order(folder, form):
    prompt = loaded(jsonl(folder, ROWS[form]))[0]
    assert prompt.ids == [*AROUND, *ids(" or "), *AROUND, *ids("?")]
    assert [file for _, file in prompt.images.files] == [PNG, JPEG]


def test_images_without_a_place_come_before_the_first_user_message(folder):
    rows = [
        {"prompt": "which?", "images": ["a.png", "b.jpg"]},
        {"prompt": [{"role": "system", "content": "Look."}, *user(text("which?"))], "images": ["a.png", "b.jpg"]},
        {"prompt": "none", "images": []},
    ]
    prompts = loaded(jsonl(folder, *rows))
    assert prompts[0].ids == [*AROUND, *AROUND, *ids("which?")]
    assert prompts[1].ids == [*ids("Look."), *AROUND, *AROUND, *ids("which?")]
    assert (prompts[2].ids, prompts[2].images) == (ids("none"), None)
    assert prompts.shows_images
    assert prompts.token_counts() == [len(prompt.ids) for prompt in prompts]


def test_a_parquet_file_in_the_form_of_the_hub_gives_the_same_prompts(folder):
    rows = [{"prompt": "<image>?", "images": [{"bytes": PNG, "path": None}]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    found = loaded(folder / "rows.parquet")[0]
    assert found.ids == [*AROUND, *ids("?")]
    assert found.images == loaded(jsonl(folder, {"prompt": "<image>?", "images": ["a.png"]}))[0].images


def test_a_named_column_holds_the_images(folder):
    source = jsonl(folder, {"prompt": "?", "scan": "a.png", "images": ["b.jpg"]})
    assert [file for _, file in loaded(source, images="scan")[0].images.files] == [PNG]
    assert "data.images=scans: " in refusal(source, images="scans")


def test_text_that_names_the_image_token_is_text(folder):
    """The name of a control token in the data stays text; only images of the row become images."""
    prompt = loaded(jsonl(folder, {"prompt": user(text("a <image> b"), {"type": "image", "image": "a.png"})}))[0]
    assert prompt.ids == [*ids("a <image> b"), *AROUND]
    assert prompt.images.short_ids.count(IMAGE_ID) == 1


def test_an_image_that_changes_during_a_run_is_refused(folder):
    prompts = loaded(jsonl(folder, {"prompt": "?", "image": "a.png"}))
    (folder / "a.png").write_bytes(picture(9))
    with pytest.raises(ConfigError, match="an image has changed since the run began"):
        prompts[0]


def test_the_fingerprint_of_prompts_depends_on_the_pixels(folder):
    source = jsonl(folder, {"prompt": "?", "image": "a.png"})
    before = loaded(source).fingerprint()
    assert loaded(source).fingerprint() == before
    (folder / "a.png").write_bytes(picture(9))
    assert loaded(source).fingerprint() != before


WRONG = {
    "a missing file": ({"prompt": "?", "image": "c.png"}, "c.png cannot be read (No such file or directory)"),
    "a broken file": ({"prompt": "?", "image": "broken.png"}, "an image cannot be decoded"),
    "an address": ({"prompt": "?", "image": "https://x/y.png"}, "is on the network; download it"),
    "a number": ({"prompt": "?", "image": 7}, "an image has the type int"),
    "broken base64": ({"prompt": "?", "image": "data:image/png;base64,%%"}, "is not valid base64"),
    "an URI without base64": ({"prompt": "?", "image": "data:image/png,abc"}, "is not in base64"),
    "fewer images than places": ({"prompt": "<image><image>", "images": ["a.png"]}, "more places for images than"),
    "more images than places": ({"prompt": "<image>", "images": ["a.png", "b.jpg"]}, "places for only 1 of them"),
    "a part without an image": ({"prompt": user({"type": "image"})}, "more places for images than"),
    "an unknown part": ({"prompt": user({"type": "audio", "audio": "x"})}, "a message has the part"),
    "no user": ({"prompt": [{"role": "system", "content": "x"}], "image": "a.png"}, "no user message"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_row_with_wrong_images_is_named(folder, case):
    (folder / "broken.png").write_bytes(PNG[: len(PNG) // 2])
    row, said = WRONG[case]
    message = refusal(jsonl(folder, {"prompt": "ok"}, row))
    assert said in message
    assert ":2: " in message


def test_a_prompt_is_too_long_if_its_images_make_it_too_long(folder):
    source = jsonl(folder, {"prompt": "1234", "image": "a.png"}, {"prompt": "short"})
    assert "the prompt has 11 tokens, longer than rollout.max_prompt_length=10" in refusal(source, max_prompt_length=10)
    assert len(loaded(source, max_prompt_length=11)) == 2
    assert len(loaded(source, max_prompt_length=10, overlong="filter")) == 1


def test_a_chat_template_that_leaves_something_out_is_refused(folder):
    processor = vision_processor()
    source = jsonl(folder, {"prompt": user(text("which?"), {"type": "image", "image": "a.png"})})
    templates = {
        "{% for m in messages %}{{ m.role }}<image>{% endfor %}": "the chat template leaves out the text 'which?'",
        "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}": (
            "the prompt has 1 images, but the chat template wrote 0 placeholders"
        ),
    }
    for template, said in templates.items():
        processor.tokenizer.chat_template = template
        with pytest.raises(ConfigError) as caught:
            load(source, processor.tokenizer, placeholders=ImagePlaceholders(processor))
        assert said in str(caught.value)


def test_a_model_that_takes_no_images_says_that_it_does_not_see_a_column(folder):
    source = jsonl(folder, {"prompt": "?", "image": "a.png"})
    prompts = load(source)
    assert prompts[0].columns == {"image": "a.png"}
    assert any("it does not see the column image" in note for note in prompts.notes)
    assert "the model takes no images" in error_of(source, images="image")
    parts = jsonl(folder, {"prompt": user({"type": "image", "image": "a.png"})})
    assert "is a list of parts" in error_of(parts)


# Tests of images


def test_pictures_are_turned_upright_and_made_rgb():
    image, buffer = Image.new("RGB", (30, 10), (255, 0, 0)), io.BytesIO()
    exif = image.getexif()
    exif[0x0112] = 6  # The camera was turned by 90 degrees.
    image.save(buffer, format="JPEG", exif=exif)
    assert decoded(buffer.getvalue()).size == (10, 30)
    assert image_info(buffer.getvalue())[1:] == (10, 30)
    buffer = io.BytesIO()
    Image.new("LA", (5, 4)).save(buffer, format="PNG")
    assert (decoded(buffer.getvalue()).mode, decoded(buffer.getvalue()).size) == ("RGB", (5, 4))


def test_an_image_may_be_bytes_or_a_dict(tmp_path):
    assert read_image(PNG, tmp_path) == PNG
    assert read_image({"bytes": PNG, "path": "gone.png"}, tmp_path) == PNG
    (tmp_path / "a.png").write_bytes(PNG)
    assert read_image({"bytes": None, "path": "a.png"}, tmp_path) == PNG


def test_equal_files_have_equal_numbers_and_other_files_other_numbers():
    numbers = {image_info(picture(seed)).number for seed in range(50)}
    assert len(numbers) == 50
    assert min(numbers) > 0
    assert image_info(picture(3)) == image_info(picture(3))


def test_messages_without_images_keep_their_content(folder):
    """Environments, teachers and reward functions read the content of messages as text."""
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "2+2?"}]
    found = loaded(jsonl(folder, {"prompt": chat}, {"prompt": [*chat, *user({"type": "image", "image": "a.png"})]}))
    assert found[0].messages == chat
    assert found[0].ids == ids("2+2?")
    assert found[1].messages == [*chat, *user({"type": "image"})]
    assert found[1].ids == [*ids("2+2?"), *AROUND]


def test_an_incomplete_processor_is_refused(folder):
    processor = vision_processor()
    processor.image_processor.size = None
    with pytest.raises(ConfigError, match="the model's processor fails for an image of 28 x 28 pixels"):
        load(
            jsonl(folder, {"prompt": "?", "image": "a.png"}),
            processor.tokenizer,
            placeholders=ImagePlaceholders(processor),
        )


def test_the_largest_id_counts_the_tokens_of_images(folder):
    processor = vision_processor()
    prompts = load(
        jsonl(folder, {"prompt": "!", "image": "a.png"}), processor.tokenizer, placeholders=ImagePlaceholders(processor)
    )
    assert prompts.largest_id() == ord("!")
    prompts._placeholders._known[28, 28] = [5, 90, 5]
    assert prompts.largest_id() == 90


def test_images_without_a_chat_are_refused():
    with pytest.raises(RowError, match="a prompt with images must be chat messages"):
        separated("text", [PNG])
    assert separated("text", []) == ("text", [])


def test_the_texts_of_a_prompt_are_those_of_its_parts():
    assert texts_of("a") == ["a"]
    assert texts_of([{"role": "user", "content": "b"}, *user({"type": "image"}, text("c"))]) == ["b", "c"]


REASONS = {
    "gemma3": "attend to each other in both directions",
    "qwen2_5_vl": "positions with three coordinates",
    "paligemma": "only the model types idefics3 and llava are tested, and this is paligemma",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_model_whose_images_are_not_supported_says_why(tmp_path, kind):
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}", "vision_config": {{"depth": 1}}}}')
    assert not takes_images(tmp_path)
    assert REASONS[kind] in why_no_images(tmp_path)


@pytest.mark.parametrize("config", ['{"model_type": "llama"}', '{"model_type": "llava", "vision_config": {"a": 1}}'])
def test_text_models_and_supported_models_have_no_reason(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    assert why_no_images(tmp_path) == ""
    assert takes_images(tmp_path) == ("llava" in config)
    assert takes_images("builtin-vision")
    assert not takes_images("builtin")
