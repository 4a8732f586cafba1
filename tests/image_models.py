"""Tiny random models that take images: an Idefics3 model and a LLaVA model, each with its processor."""

import io
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from rltrain.data.prompt_images import ImagePlaceholders, PromptImages, decoded, image_info
from rltrain.tasks.tiny_model import tiny_vision_model
from rltrain.tasks.tokenizer import EOS_ID, PAD_ID, byte_tokenizer
from rltrain.tasks.vision_processor import CHAT_TEMPLATE, IMAGE_ID, vision_processor

KINDS = ("idefics3", "llava")
SIZE, PATCH = 28, 7


def picture(seed: int, *, width: int = SIZE, height: int = SIZE, kind: str = "PNG") -> bytes:
    """Return the file of a random picture."""
    pixels = Random(seed).randbytes(3 * width * height)
    buffer = io.BytesIO()
    Image.frombytes("RGB", (width, height), pixels).save(buffer, format=kind)
    return buffer.getvalue()


def make(kind: str) -> tuple[Any, Any]:
    """Return a random model of the given kind, and its processor."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "idefics3":
            return tiny_vision_model(), vision_processor()
        return _llava()


def _llava() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer(eos_token="<eos>", control={IMAGE_ID: "<image>"})
    tokenizer.chat_template = CHAT_TEMPLATE
    edges = {"height": SIZE, "width": SIZE}
    images = CLIPImageProcessorPil(size=edges, crop_size=edges)
    processor = LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=PATCH, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=SIZE,
        patch_size=PATCH, projection_dim=32, initializer_factor=10.0,
    )  # fmt: skip
    text = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=EOS_ID,
        pad_token_id=PAD_ID, initializer_range=0.2,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE_ID, vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    return LlavaForConditionalGeneration(config), processor


def save(kind: str, folder: Path) -> Path:
    """Save a random model with its processor and its tokenizer, and return the folder."""
    model, processor = make(kind)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def own_log_probs(
    model: Any, processor: Any, rows: Sequence[tuple[Sequence[bytes], str, Sequence[int]]], *, temperature: float
) -> torch.Tensor:
    """Return the log-prob of each response token, from passes of transformers' own model over one row each.

    The pictures go through the whole processor. An image token in a response is embedded as an ordinary token.

    Args:
        model: the model.
        processor: the model's processor.
        rows: the rows as (files of the prompt's images, text with one placeholder for each image, response).
        temperature: temperature by which the logits are divided.
    """
    found = []
    for images, text, response in rows:
        pictures = {"images": [decoded(file) for file in images]} if images else {}
        made = processor(text=text, add_special_tokens=False, return_tensors="pt", **pictures)
        prompt = made.pop("input_ids")
        made.pop("attention_mask")
        embeddings = model.get_input_embeddings()(torch.cat([prompt, torch.tensor([response])], 1))
        if images:
            features = model.get_image_features(**made, return_dict=True).pooler_output
            features = torch.cat([one.reshape(-1, embeddings.size(-1)) for one in features])
            places = torch.nn.functional.pad(prompt[0] == IMAGE_ID, (0, len(response)))
            embeddings = embeddings.masked_scatter(places[None, :, None], features)
        logits = model(inputs_embeds=embeddings, use_cache=False).logits[0] / temperature
        log_probs = logits.log_softmax(-1)[prompt.size(1) - 1 : -1]
        found.append(log_probs.gather(1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(found)


def shown(processor: Any, images: Sequence[bytes], text: str) -> tuple[list[int], PromptImages | None]:
    """Return the token ids of a prompt, and its images, given a text with one placeholder for each image."""
    infos = [image_info(file) for file in images]
    short = processor.tokenizer.encode(text, add_special_tokens=False)
    ids, numbers = ImagePlaceholders(processor).replaced(short, infos)
    files = tuple((info.number, file) for info, file in zip(infos, images, strict=True))
    return ids, PromptImages(files, short, numbers) if files else None
