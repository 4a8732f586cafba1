"""Convert a Llama model in a GGUF file to a directory in Hugging Face format.

Run the script with `python examples/demo_llm/convert.py MODEL.gguf DIRECTORY`. The script needs the package gguf.

The transformers library reads the quantised weights as float32, but refuses to save a model whose config says that the
weights are quantised. The script therefore copies the weights into a new model whose config has no quantisation.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main(source: Path, directory: Path) -> None:
    """Convert the GGUF file `source`, and write the model and its tokenizer to `directory`."""
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    values = read.config.to_dict()
    values.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(read.state_dict())
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(**where).save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: convert.py MODEL.gguf DIRECTORY")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
