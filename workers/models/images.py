"""Images in forward passes: the features of images take the places of the embeddings of image tokens.

transformers' own models find the places of images by the id of the image token. A policy can sample this token too, so
rltrain marks the places itself. The features come from the model's method `get_image_features`, and a hook of the input
embeddings puts them in place, within the forward pass of the whole model. FSDP has then gathered the parameters of the
vision encoder.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel

from rltrain.data.image_models import load_processor, takes_images
from rltrain.data.prompt_images import decoded

BLANK = Image.new("RGB", (32, 32))
_SHOWN = "shown_images"  # Name of the attribute of a model that holds its `ShownImages`.


class ShownImages:
    """The images that a model sees in its next forward passes.

    Args:
        model: the model, which takes images.
        load: function that loads the model's processor. It is called when the first image is shown.
    """

    def __init__(self, model: PreTrainedModel, load: Callable[[], Any]) -> None:
        self._model: Any = model
        self._processor = functools.cache(load)
        self._files: Sequence[bytes] = ()
        self._places: Tensor | None = None

    @contextlib.contextmanager
    def during(self, files: Sequence[bytes], places: Tensor) -> Iterator[None]:
        """Show images to the model in the forward passes of the `with` block.

        Without images, the model encodes a blank image and ignores its features, so that the parameters of the vision
        encoder have gradients, which are 0. FSDP needs gradients of the same parameters on all ranks, and other ranks
        may have images.

        Args:
            files: content of the images' files, in the order of their places.
            places: (B, N) bool; True at the input tokens that show a part of an image.
        """
        self._files, self._places = files, places
        try:
            yield
        finally:
            self._files, self._places = (), None

    def merged(self, module: nn.Module, inputs: Any, embeddings: Tensor) -> Tensor | None:
        """Put the features of the images into the embeddings (B, N, H). Runs as a hook of the input embeddings."""
        if self._places is None:
            return None
        places = self._places.to(embeddings.device)
        features = self._features(embeddings.device).to(embeddings.dtype)
        tokens = int(places.sum())
        if self._files and features.size(0) != tokens:
            raise RuntimeError(
                f"{len(self._files)} images have {features.size(0)} features, but {tokens} tokens in the prompts; the "
                "processor of the model's directory does not belong to the model"
            )
        return embeddings.masked_scatter(places[..., None], features)

    def _features(self, device: torch.device) -> Tensor:
        """Return the features (M, H) of the M tokens of all images."""
        pictures = [decoded(file) for file in self._files] or [BLANK]
        inputs = self._processor().image_processor(images=[pictures], return_tensors="pt")
        kept = {name: value.to(device) for name, value in inputs.items() if isinstance(value, Tensor)}
        found = self._model.get_image_features(**kept, return_dict=True).pooler_output
        parts = found if isinstance(found, list | tuple) else [found]
        return torch.cat([part.flatten(0, -2) for part in parts])


def show_images(model: PreTrainedModel, path: str) -> None:
    """Make a model that was loaded from the directory `path` ready for images, if it takes images."""
    if not takes_images(path):
        return
    shown = ShownImages(model, functools.partial(load_processor, path))
    vars(model)[_SHOWN] = shown
    embeddings: nn.Module = model.get_input_embeddings()
    embeddings.register_forward_hook(shown.merged)


def images_shown(model: PreTrainedModel, files: Sequence[bytes], places: Tensor | None) -> Any:
    """Return a context manager within which a model sees images; see `ShownImages.during`.

    `places` is None if no rank has images.
    """
    if places is None:
        return contextlib.nullcontext()
    shown: ShownImages | None = vars(model).get(_SHOWN)
    assert shown is not None, "only a model that takes images can see the images of prompts"
    return shown.during(files, places)
