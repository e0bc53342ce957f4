"""``LatentMoE``: experts that compute in a space of fewer dimensions than the model."""

from typing import Any

import torch


class LatentMoE(torch.nn.Module):
    """Computes ``up(norm(experts(down(x), ids, weights))) + shared``, as Nemotron-3 Super and Ultra and Kimi-K3 do.

        >>> experts = MoE.from_experts(torch.randn(4, 64, 32), torch.randn(4, 32, 64), weight_layout="none", activation="relu2")
        >>> down, up = QuantizedLinear(128, 32, False), QuantizedLinear(32, 128, False)
        >>> LatentMoE(down, experts, up)(torch.randn(3, 128).bfloat16(), *route(torch.randn(3, 4), 2)).shape
        torch.Size([3, 128])

    The router and shared experts read ``x`` itself. Nemotron-3 calls the projections ``fc1_latent_proj`` and ``fc2_latent_proj``;
    Kimi-K3 calls them ``routed_expert_down_proj`` and ``routed_expert_up_proj``, with ``routed_expert_norm`` before the latter.

    Args:
        down: module [T, H] -> [T, L] with the latent size L, such as a QuantizedLinear or torch.nn.Linear.
        experts: a ``MoE`` with ``hidden_size=L``, or a module that takes the same arguments.
        up: module [T, L] -> [T, H].
        norm: module [T, L] -> [T, L] between the experts' sum and ``up``, or None.

    Raises:
        ValueError: ``down.out_features``, ``experts.hidden_size`` and ``up.in_features``, where they exist, differ.
    """

    def __init__(
        self,
        down: torch.nn.Module,
        experts: torch.nn.Module,
        up: torch.nn.Module,
        norm: torch.nn.Module | None = None,
    ):
        super().__init__()
        sizes: dict[str, Any] = {
            "down.out_features": getattr(down, "out_features", None),
            "experts.hidden_size": getattr(experts, "hidden_size", None),
            "up.in_features": getattr(up, "in_features", None),
        }
        if len({size for size in sizes.values() if size is not None}) > 1:
            told = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(f"{told}: the experts' hidden size is the size of the latent space")
        self.down, self.experts, self.up, self.norm = down, experts, up, norm

    def forward(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the layer's result.

        Args:
            x: float16 or bfloat16 [T, H].
            ids, weights: integers and float32 [T, k]; see ``MoE``.
            shared: added to the result; dtype and shape of x.

        Returns:
            [T, H] in the dtype of x.
        """
        y = self.experts(self.down(x), ids, weights)
        y = self.up(y if self.norm is None else self.norm(y))
        return y if shared is None else y + shared
