"""Converts a Llama model in a GGUF file to a directory in Hugging Face format.

    python examples/demo_llm/convert.py MODEL.gguf DIRECTORY

transformers reads the quantised weights as float32. It refuses to save the model, because the model's config says that
the model is quantised. So the weights are copied into a new model without such a config. Needs the package gguf.
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
