"""Tests that the transformers engine answers prompts with images as the model itself does."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from rltrain.settings.compose import compose
from rltrain.tasks.tokenizer import EOS_ID
from tests.image_models import KINDS, own_log_probs, picture, save, shown
from workers.rollout.engines.hf.decoding import prompt_key
from workers.rollout.engines.hf.engine import make
from workers.rollout.messages import Request

A, B = picture(1), picture(2, width=50, height=28)
PROMPTS = [([A], "<image>which?"), ([B], "<image>which?"), ([], "no image"), ([A, B], "<image> or <image>, say it")]


@pytest.fixture(params=KINDS, scope="module")
def path(request, tmp_path_factory):
    return str(save(request.param, tmp_path_factory.mktemp("model") / request.param))


def requests_of(processor, count=8):
    made = []
    for number in range(count):
        ids, images = shown(processor, *PROMPTS[number % len(PROMPTS)])
        made.append(Request((number % len(PROMPTS), number), ids, 0.7, 6, 100 + number, images))
    return made


def answers(engine, requests, *, late=(), change_at=None):
    """Return the answers by sample number. The requests `late` arrive after two steps."""
    engine.add(requests)
    found, steps = {}, 0
    while engine.busy:
        found |= {answer.key[1]: answer for answer in engine.step()}
        steps += 1
        if steps == 2:
            engine.add(late)
        if steps == change_at:
            with torch.no_grad():
                for parameter in engine.model.parameters():
                    parameter.mul_(1.01)
            engine.stale = True
    return found


def rows_of(found):
    return [(*PROMPTS[number % len(PROMPTS)], list(found[number].token_ids)) for number in sorted(found)]


def test_log_probs_are_those_of_the_model_however_requests_are_batched(path):
    processor = AutoProcessor.from_pretrained(path)
    requests = requests_of(processor)
    found = answers(make(compose(["rollout=hf"])[0], path, [EOS_ID]), requests[:5], late=requests[5:])
    assert sorted(found) == list(range(8))
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    with torch.no_grad():
        wanted = own_log_probs(model, processor, rows_of(found), temperature=0.7)
    given = torch.cat([torch.tensor(found[number].log_probs) for number in sorted(found)])
    torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-5)


def test_after_new_weights_the_images_are_seen_again(path):
    """The key-value cache is recomputed from the tokens, and the tokens of images need the images' features."""
    processor = AutoProcessor.from_pretrained(path)
    engine = make(compose(["rollout=hf"])[0], path, [])
    found = answers(engine, requests_of(processor, 4), change_at=3)
    assert {len(answer.token_ids) for answer in found.values()} == {6}
    with torch.no_grad():
        wanted = own_log_probs(engine.model, processor, rows_of(found), temperature=0.7).view(4, 6)
    given = torch.tensor([list(found[number].log_probs) for number in range(4)])
    torch.testing.assert_close(given[:, 3:], wanted[:, 3:], rtol=1e-3, atol=1e-4)


def test_requests_have_the_same_prompt_only_if_they_show_the_same_images(path):
    first, second, *_ = requests_of(AutoProcessor.from_pretrained(path))
    assert first.prompt_ids == second.prompt_ids or "llava" not in path
    assert prompt_key(first) != prompt_key(second)
    assert prompt_key(first) == prompt_key(replace(first, seed=7, key=(9, 9)))
