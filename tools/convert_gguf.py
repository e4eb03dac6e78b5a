#!/usr/bin/env python3
"""Writes a GGUF model of the Llama family as a folder that vLLM loads: safetensors, config, tokenizer.

    pip install torch transformers accelerate gguf
    tools/convert_gguf.py ~/.cache/headwater/SmolLM2-135M-Instruct.Q4_1.gguf build/smollm2 [--dtype float32]

Quantised blocks are expanded to the dtype, so both servers compute with the same weights. transformers reads the file
(it also undoes the order of rows that GGUF keeps q and k in).
"""

import argparse
import pathlib

import safetensors.torch
import torch
import transformers


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=pathlib.Path)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    source = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, args.dtype))
    args.folder.mkdir(parents=True, exist_ok=True)
    # Without the note that the weights came from a quantised file, with which transformers would not save them.
    config = model.config
    config.__dict__.pop("quantization_config", None)
    config.dtype = getattr(torch, args.dtype)
    config.architectures = [type(model).__name__]
    config.save_pretrained(args.folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    safetensors.torch.save_file(weights, args.folder / "model.safetensors", metadata={"format": "pt"})
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(args.folder)
    print(f"{args.folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters in {args.dtype}")


if __name__ == "__main__":
    main()
