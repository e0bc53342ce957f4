"""``PersistentMLP``: a chain of equal layers in one launch."""

import math
from collections.abc import Sequence

import torch

from nvfp4_cute import private_api
from nvfp4_cute.formats.block_scaled import NVFP4Tensor
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.nn.seen import Seen
from nvfp4_cute.nn.state import Picklable, moving
from nvfp4_cute.ops.gemm_chain import ChainWorkspace, gemm_chain
from nvfp4_cute.ops.traced import refuse_config
from nvfp4_cute.planning.config import KernelConfig


class PersistentMLP(Picklable):
    """Equal layers with only quantization between them, computed in one launch (``gemm_chain``).

        >>> weights = [quantize(torch.randn(256, 256) / 16) for _ in range(3)]
        >>> mlp = PersistentMLP(weights, [0.002] * 4)
        >>> mlp(quantize(torch.randn(40, 256), global_scale=mlp.input_global_scale)).shape
        (40, 256)

    Results of inner layers stay in L2. The bits are those of one ``gemm`` per layer with NVFP4 results. There are kernels for
    sm_100a, sm_103a and sm_110a; on other GPUs the error says to call ``gemm``.

    The input carries its own global scale. If that is the module's ``input_global_scale`` tensor, a call is the one launch and
    nothing else; otherwise the first factor is recomputed.

    State dict:
        weight: uint8 [G, N, N/2].
        weight_scale: float8_e4m3fn [G, rn, rk, 32, 4, 4].
        alpha, out_global_scale, weight_global_scale: float32 [G].
        input_global_scale: float32.

    Args:
        weights: one [N, N] per layer; copied into one tensor.
        global_scales: G + 1 numbers: the global scale of the input and of each layer's result (calibrated: amax / 2688).
        backend: see ``gemm``.
        config: see ``grouped_gemm``.

    Raises:
        ValueError: weights are not square or differ in size, the number of global scales is not G + 1, or one of them is not
            finite and positive.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    alpha: torch.Tensor
    out_global_scale: torch.Tensor
    weight_global_scale: torch.Tensor
    input_global_scale: torch.Tensor

    def __init__(
        self,
        weights: Sequence[NVFP4Tensor],
        global_scales: Sequence[float],
        *,
        backend: str = "auto",
        config: KernelConfig | None = None,
    ):
        super().__init__()
        shapes = {tuple(w.shape) for w in weights}
        if len(shapes) != 1 or any(len(shape) != 2 or shape[0] != shape[1] for shape in shapes):
            raise ValueError(
                f"weights have shapes {sorted(shapes)}; a chain of equal layers takes [N, N], at least one"
            )
        if len(global_scales) != len(weights) + 1:
            raise ValueError(
                f"global_scales has {len(global_scales)} numbers for {len(weights)} layers; pass one for the input and one "
                f"for each result: {len(weights) + 1}"
            )
        for i, number in enumerate(map(float, global_scales)):
            if not 0 < number < math.inf:
                raise ValueError(
                    f"global_scales[{i}] is {number:g}; a global scale is finite and positive: amax / 2688 of what it is for"
                )
        device = weights[0].data.device
        scales = [w.scale.view(torch.float8_e4m3fn) for w in weights]
        scales = [
            scale if w.scale_layout == "blocked" else to_blocked(scale)
            for w, scale in zip(weights, scales, strict=True)
        ]
        factors = torch.tensor(global_scales, dtype=torch.float32, device=device)
        ones = torch.ones((), dtype=torch.float32, device=device)
        own = torch.stack([ones if w.global_scale is None else w.global_scale for w in weights])
        self.register_buffer("weight", torch.stack([w.data.view(torch.uint8) for w in weights]))
        self.register_buffer("weight_scale", torch.stack(scales))
        self.register_buffer("alpha", factors[:-1] * own)
        self.register_buffer("out_global_scale", factors[1:].clone())
        self.register_buffer("weight_global_scale", own)
        self.register_buffer("input_global_scale", factors[0].clone())
        self.backend, self.config = backend, config
        self._seen = Seen()
        self._workspaces: dict[tuple[int, torch.device], ChainWorkspace] = {}

    def forward(self, x: NVFP4Tensor) -> NVFP4Tensor:
        """Maps ``x`` [M, N] to the last layer's result [M, N].

        Calls of one module must follow each other on one stream, because they share counters and the results of inner layers.

        Args:
            x: quantized with any global scale; without one, it is 1.
        """
        if not isinstance(x, NVFP4Tensor):
            raise TypeError(f"x is a {type(x).__name__}; pass an NVFP4Tensor: quantize(x, global_scale=...)")
        alpha = self._alpha(x.global_scale)
        if private_api.is_traced():  # the custom op that a traced graph keeps
            refuse_config(self.config)
            parts = (x.data, self.weight, x.scale, self.weight_scale, alpha, self.out_global_scale)
            data, scale = torch.ops.nvfp4_cute.gemm_chain(*parts, self.backend)
            return NVFP4Tensor(data, scale, self.out_global_scale[-1], tuple(x.shape))
        key = (x.shape[0], x.data.device)
        if key not in self._workspaces:
            self._workspaces[key] = ChainWorkspace.make(len(self.weight), x.shape[0], x.shape[1], key[1])
        return gemm_chain(
            x.data,
            self.weight,
            x.scale,
            self.weight_scale,
            alpha,
            self.out_global_scale,
            self._workspaces[key],
            backend=self.backend,
            config=self.config,
        )

    def _alpha(self, given: torch.Tensor | None) -> torch.Tensor:
        """Returns the factors of all layers; the first includes the input's global scale."""
        own, results = self.weight_global_scale, self.out_global_scale[:-1]
        if private_api.is_traced():
            ones = torch.ones_like(self.input_global_scale)
            return own * torch.cat([(ones if given is None else given).reshape(1), results])
        if not self._seen.is_current():  # scales were written since
            self.alpha.copy_(own * torch.cat([self.input_global_scale.reshape(1), results]))
            names = ("input_global_scale", "out_global_scale", "weight_global_scale", "alpha")
            self._seen = Seen((self._buffers, name) for name in names)
        if given is not None and given.data_ptr() == self.input_global_scale.data_ptr():
            return self.alpha
        return torch.cat([own[:1] if given is None else own[:1] * given, self.alpha[1:]])

    def _apply(self, fn, recurse=True):
        return super()._apply(moving(fn), recurse)
