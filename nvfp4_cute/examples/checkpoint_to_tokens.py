"""Generates text from a quantized checkpoint: python -m nvfp4_cute.examples.checkpoint_to_tokens FOLDER "Once upon a time"

Needs the extra "models" (transformers).
"""

import argparse

import torch
from transformers import AutoTokenizer

from nvfp4_cute.models.transformers import load


def main(arguments: list[str] | None = None) -> list[int]:
    """Loads a folder of ModelOpt, compressed-tensors, GPTQ, AWQ, gpt-oss or FP8 and decodes greedily.

    A folder without a tokenizer continues the token 1 and prints token ids.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", help="a quantized checkpoint")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate (default: %(default)s)")
    args = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(args.folder, dtype="bfloat16", device_map=device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.folder)
    except (OSError, ValueError):
        tokenizer = None
    prompt = (
        tokenizer(args.prompt, return_tensors="pt").input_ids.long() if tokenizer else torch.tensor([[1]])
    )
    if not prompt.numel():  # transformers may make a tokenizer without words where a folder has none
        tokenizer, prompt = None, torch.tensor([[1]])
    out = model.generate(prompt.to(device), max_new_tokens=args.tokens, do_sample=False, use_cache=True)[0]
    tokens: list[int] = out.tolist()
    print(tokenizer.decode(out, skip_special_tokens=True) if tokenizer else tokens)
    return tokens


if __name__ == "__main__":
    main()
