"""The tokenizer and the processor of the built-in tasks with pictures."""

from transformers import Idefics3Processor, Qwen2Tokenizer
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

from rltrain.tasks.digit import SIZE
from rltrain.tasks.tokenizer import EOS_TOKEN, byte_tokenizer

IMAGE_ID, IMAGE_TOKEN = 4, "<image>"
PATCH, SHUFFLE = 7, 2  # A patch has 7 x 7 pixels, and 2 x 2 patches become one token.
# Control tokens that the processor of Idefics3 models writes around the tokens of an image.
_AROUND = {5: "<fake_token_around_image>", 6: "<end_of_utterance>", 7: "<global-img>"}
CHAT_TEMPLATE = """\
{%- for message in messages %}
    {%- for part in message.content %}
        {{- '<image>' if part.type == 'image' else part.text }}
    {%- endfor %}
{%- endfor %}"""


def vision_tokenizer() -> Qwen2Tokenizer:
    """Build the character tokenizer with the control tokens of images and a chat template."""
    tokenizer = byte_tokenizer(eos_token=EOS_TOKEN, control={IMAGE_ID: IMAGE_TOKEN, **_AROUND})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def vision_processor() -> Idefics3Processor:
    """Build the processor, which scales pictures to `SIZE` pixels and shows each as four tokens."""
    edge = {"longest_edge": SIZE}
    images = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    tokens = (SIZE // PATCH // SHUFFLE) ** 2
    return Idefics3Processor(
        image_processor=images, tokenizer=vision_tokenizer(), image_seq_len=tokens, chat_template=CHAT_TEMPLATE
    )
