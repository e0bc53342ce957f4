"""Replaces a 16-bit mixture-of-experts block by NVFP4 weights: python -m nvfp4_cute.examples.moe_block"""

import torch

from nvfp4_cute import MoE, route


class Block(torch.nn.Module):
    """A router and its experts, as in Qwen3-MoE.

    Args:
        gate_up: [E, 2 I, H], the gate's rows before those of the up projection.
        down: [E, H, I].
        router: [E, H].
        top_k: experts per token.
    """

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, router: torch.Tensor, top_k: int) -> None:
        super().__init__()
        self.experts = MoE.from_experts(gate_up, down)
        self.router = torch.nn.Parameter(router, requires_grad=False)
        self.top_k = top_k

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [T, H] in the dtype of x [T, H]. Nothing waits for the device, so a CUDA graph captures the block."""
        ids, weights = route(x @ self.router.T, self.top_k)  # int32 and float32 [T, top_k]
        y: torch.Tensor = self.experts(x, ids, weights)
        return y


def main() -> torch.Tensor:
    """Runs a block of 8 experts and prints the relative error of its result with 4-bit weights and activations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)

    experts, hidden, width = 8, 256, 512
    gate_up, down = draw(experts, 2 * width, hidden) / hidden**0.5, draw(experts, hidden, width) / width**0.5
    block = Block(gate_up, down, draw(experts, hidden), top_k=2)
    x = draw(40, hidden)
    y: torch.Tensor = block(x)

    ids, weights = route(x @ block.router.T, 2)
    exact = torch.zeros(x.shape, device=device)
    for token, (chosen, factors) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
        for expert, factor in zip(chosen, factors, strict=True):
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            exact[token] += factor * (down[expert].float() @ (torch.nn.functional.silu(gate) * up))
    error = (y.float() - exact).norm() / exact.norm()
    print(f"{tuple(y.shape)}, relative error against 16-bit experts {error:.3f}")
    return y


if __name__ == "__main__":
    main()
