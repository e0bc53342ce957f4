"""Sends a prompt to a model that vLLM serves with our kernels.

    pip install "nvfp4-cute[vllm]" openai
    vllm serve FOLDER-NVFP4 --port 8000
    python -m nvfp4_cute.examples.vllm_client --url http://localhost:8000/v1 "Why is the sky blue?"

vLLM finds the plug-in by itself; `nvfp4-cute doctor` tells whether it is active.
"""

import argparse

from openai import OpenAI


def main(arguments: list[str] | None = None) -> str:
    """Sends one prompt to the first model of the server and prints the completion."""
    parser = argparse.ArgumentParser(description="ask a model that vLLM serves")
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://localhost:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate (default: %(default)s)")
    args = parser.parse_args(arguments)

    client = OpenAI(base_url=args.url, api_key="none")
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model, prompt=args.prompt, max_tokens=args.tokens, temperature=0.0
    )
    text: str = answer.choices[0].text
    print(text)
    return text


if __name__ == "__main__":
    main()
