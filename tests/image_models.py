"""Tiny random models that take images: an Idefics3 model and a LLaVA model, each with its processor."""

import io
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
