"""Tests of packs with images, against the forward pass of transformers' own models."""

from collections import Counter

import pytest
import torch

from rltrain.base.errors import ConfigError
from rltrain.batch.data_proto import DataProto, jagged
from rltrain.batch.images import images_of, joined, shown_files
from rltrain.batch.prefix_tree import LEAST
from rltrain.batch.shared_starts import shared_starts
from rltrain.data.model_weights import text_attention
from rltrain.data.prompt_images import ImagePlaceholders, image_info
from rltrain.tasks.vision_processor import IMAGE_ID
from tests.image_models import KINDS, make, own_log_probs, picture, save
from workers.models.fsdp import decoder_layers
from workers.models.images import ShownImages, images_shown, show_images
from workers.models.packed_forward import PACKED, pack, policy_output
from workers.models.row_isolation import check_policy_rows_apart, load_policy

A, B = picture(1), picture(2)
# Rows as (files of the prompt's images, text around the images, response). The first two rows have the same prompt; the
# third differs from them only in its image. The fifth row samples the token that stands for images.
ROWS = [
    ([A], "<image>which?", [48, 49, 3]),
    ([A], "<image>which?", [50, 3]),
    ([B], "<image>which?", [48, 49, 51, 3]),
    ([], "no image here", [60, 61]),
    ([B, A], "<image>and <image>", [70, IMAGE_ID, 71]),
    ([A, A], "<image><image>twice", [3]),
]


def batch_of(rows, processor):
    """Return the batch of rows, and for each row its prompt's token ids."""
    placeholders = ImagePlaceholders(processor)
    ids, numbers, files = [], [], []
    for images, text, _ in rows:
        infos = [image_info(file) for file in images]
        found = placeholders.replaced(processor.tokenizer.encode(text, add_special_tokens=False), infos)
        ids.append(found[0])
        numbers.append(found[1])
        files.append(joined((info.number, file) for info, file in zip(infos, images, strict=True)))
    return DataProto.from_dict(
        {
            "prompts": jagged(ids, torch.int64),
            "responses": jagged([row[2] for row in rows], torch.int64),
            "prompt_images": jagged(numbers, torch.int64),
            "image_files": jagged(files, torch.uint8),
        }
    )


def packed_model(kind):
    model, processor = make(kind)
    model = model.double().eval()
    vars(model)["shown_images"] = shown = ShownImages(model, lambda: processor)
    model.get_input_embeddings().register_forward_hook(shown.merged)
    return model, processor


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_with_images_gives_the_log_probs_and_gradients_of_the_models_own_passes(kind, share):
    model, processor = packed_model(kind)
    wanted = own_log_probs(model, processor, ROWS, temperature=0.7)
    weights = torch.linspace(-1, 1, len(wanted), dtype=torch.float64)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad((wanted * weights).sum(), parameters, allow_unused=True)
    model.set_attn_implementation(text_attention(model.config, PACKED))
    output = policy_output(model, pack(batch_of(ROWS, processor), share=share), temperature=0.7)
    torch.testing.assert_close(output.log_probs, wanted, rtol=1e-6, atol=1e-7)
    found = torch.autograd.grad((output.log_probs * weights).sum(), parameters, allow_unused=True)
    vision = 0
    for (name, _), own, other in zip(model.named_parameters(), found, gradients, strict=True):
        assert (own is None) == (other is None), name
        if own is not None:
            # The models compute their norms in float32.
            assert float((own - other).abs().max()) <= 1e-5 * max(1.0, float(other.abs().max())), name
            vision += "vision" in name and bool(own.abs().max() > 1e-6)
    assert vision > 10, "the vision encoder must get gradients"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_share_a_prompt_only_if_their_images_are_the_same(kind):
    _, processor = make(kind)
    packed = pack(batch_of(ROWS[:3], processor))
    assert packed.images == (A, B)
    alone = [len(pack(batch_of([row], processor)).input_ids[0]) for row in ROWS[:3]]
    shared = len(batch_of(ROWS[:1], processor).values("prompts"))
    assert packed.input_ids.size(1) == sum(alone) - shared
    apart = pack(batch_of(ROWS[:3], processor), share=False)
    assert apart.images == (A, A, B)
    assert apart.input_ids.size(1) == sum(alone)


def test_the_images_of_a_pack_are_in_the_order_of_their_tokens():
    _, processor = make("idefics3")
    batch = batch_of(ROWS, processor)
    assert pack(batch, share=False).images == (A, A, B, B, A, A, A)
    assert Counter(pack(batch).images) == Counter({A: 4, B: 2})
    assert [[file for _, file in row] for row in images_of(batch)] == [row[0] for row in ROWS]
    assert shown_files(batch, torch.zeros(5, dtype=torch.int64)) == ()


def test_rows_with_other_images_share_no_tokens_when_costs_are_estimated():
    _, processor = make("idefics3")
    text = "<image>" + "which digit is this? " * 3
    batch = batch_of([([A], text, [48, 3]), ([A], text, [49, 3]), ([B], text, [48, 3])], processor)
    length = int(batch.lengths("prompts")[0])
    found = shared_starts(batch)  # Without `uid`, all rows count as one group.
    assert found.place == [0, 1, 2]
    assert found.tokens == [0, length - (LEAST - 1), 0]


def test_image_files_survive_a_round_trip_through_a_batch():
    columns = {"image_files": jagged([joined([(7, A), (9, b"")]), joined([]), joined([(5, B)])], torch.uint8)}
    batch = DataProto.from_dict(columns)
    assert images_of(batch) == [[(7, A), (9, b"")], [], [(5, B)]]
    assert images_of(batch[[2, 1]]) == [[(5, B)], []]


def test_images_that_do_not_fill_their_places_are_refused():
    model, processor = packed_model("idefics3")
    model.set_attn_implementation(text_attention(model.config, PACKED))
    packed = pack(batch_of(ROWS[:1], processor))
    with pytest.raises(RuntimeError, match="2 images have 8 features, but 4 tokens"):
        policy_output(model, pack_with(packed, images=(A, B)), temperature=1.0)


def pack_with(packed, **changes):
    return type(packed)(**vars(packed) | changes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pack_without_images_has_zero_gradients_for_images_if_other_rows_of_the_batch_show_some(kind):
    """FSDP reduces gradients over all ranks, so each rank needs gradients of the same parameters."""
    model, processor = packed_model(kind)
    wanted = own_log_probs(model, processor, ROWS[3:4], temperature=0.7)
    model.set_attn_implementation(text_attention(model.config, PACKED))
    packed = pack(batch_of(ROWS, processor)[[3]])
    assert packed.images == ()
    output = policy_output(model, packed, temperature=0.7)
    torch.testing.assert_close(output.log_probs, wanted, rtol=1e-6, atol=1e-7)
    output.log_probs.sum().backward()
    vision = {name: p.grad for name, p in model.named_parameters() if "vision" in name and p.grad is not None}
    assert len(vision) > 10
    assert all(not gradient.any() for gradient in vision.values())
    model.zero_grad()
    text = batch_of(ROWS, processor)[[3]].select(["prompts", "responses"])
    policy_output(model, pack(text), temperature=0.7).log_probs.sum().backward()
    assert all(p.grad is None for name, p in model.named_parameters() if "vision" in name)


def test_images_are_shown_only_inside_the_with_block():
    model, _ = packed_model("llava")
    ids = torch.tensor([[IMAGE_ID] * 16])
    plain = model.get_input_embeddings()(ids)
    with images_shown(model, [A], torch.ones(1, 16, dtype=torch.bool)):
        inside = model.get_input_embeddings()(ids)
    assert not torch.allclose(plain, inside)
    torch.testing.assert_close(model.get_input_embeddings()(ids), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_loaded_with_packed_attention_for_text_alone(kind, tmp_path):
    path = str(save(kind, tmp_path / kind))
    check_policy_rows_apart(path, f"model.path={path}")
    model = load_policy(path, arrange=lambda model: None, device=torch.device("cpu"))
    assert model.config.text_config._attn_implementation == PACKED
    assert model.config.vision_config._attn_implementation == "sdpa"
    assert len(decoder_layers(model)) == 2, "the layers of the vision encoder are no decoder layers"
    assert "shown_images" in vars(model)


def test_a_text_model_is_left_alone(tmp_path):
    model, _ = make("idefics3")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    show_images(model, str(tmp_path))
    assert "shown_images" not in vars(model)


def test_a_model_without_a_processor_is_refused_when_it_sees_its_first_image(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    model, _ = make("llava")
    show_images(model, str(tmp_path))
    ids = torch.tensor([[IMAGE_ID] * 16])
    model.get_input_embeddings()(ids)
    with (
        images_shown(model, [A], torch.ones(1, 16, dtype=torch.bool)),
        pytest.raises(ConfigError, match="the processor of images does not load"),
    ):
        model.get_input_embeddings()(ids)
