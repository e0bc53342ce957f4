"""``Activation``: the function between the two products of a gated layer, with its constants and its limit.

``Activation.function`` is the text of a function and its constants, without the limit: the name alone if all constants have
their defaults, such as "silu"; otherwise for example "situ(beta=4.0,linear_beta=25.0)". Custom operations, keys of kernels and
tasks hold this text.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

FLOAT32_MAX = 3.4028234663852886e38
ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai", "situ"]
NAMES = get_args(ActivationName)
# Text instead of an activation: rows are activated already.
IDENTITY = "identity"
# Constants of each function, with defaults. A default of None bounds nothing.
CONSTANTS: dict[str, dict[str, float | None]] = {
    "swiglu_oai": {"alpha": 1.702},
    "situ": {"beta": 1.0, "linear_beta": None},
}

# Range of constants in which kernels' float32 coefficients neither overflow nor vanish.
LEAST, MOST = 1e-4, 1e4

# ---- coefficients of approximations, for kernels and ``experts.activation`` ---------------------------------------
GELU_LINEAR, GELU_CUBIC = 1.5957691216057308, 0.044715  # 2 * sqrt(2 / pi)
# Probability of a standard normal value below -a, for a from 0 to 16: exp(-a^2 / 2) * (t * NORMAL[0] + ... + t^8 * NORMAL[7])
# with t = 1 / (1 + NORMAL_SLOPE * a). The relative error is at most 2^-21.9, before rounding.
NORMAL_SLOPE, NORMAL_MAX = 0.3, 16.0
NORMAL = (
    0.1196390837430954, 0.12060052901506424, 0.10088932514190674, 0.1252916306257248,
    -0.04742610827088356, 0.19948753714561462, -0.15318694710731506, 0.03470483422279358,
)  # fmt: skip
# tanh(z) / z - 1 = z^2 * (TANH[0] + ... + z^6 * TANH[3]) for |z| up to TANH_SMALL. The relative error of tanh is at most
# 2^-23.4, before rounding.
TANH_SMALL = 0.6
TANH = (-0.33332598209381104, 0.13313116133213043, -0.05221179872751236, 0.015612617135047913)


def check_limit(limit: Any) -> None:
    """Raises ValueError unless ``limit`` is None, infinity, or a positive number in the range of float32."""
    if limit is None:
        return
    if not isinstance(limit, int | float) or not (0 < limit <= FLOAT32_MAX or limit == math.inf):
        raise ValueError(f"limit={limit!r:.20} is not a positive number of float32; pass None for no limit")


@dataclass(frozen=True)
class Activation:
    """The activation of a layer: ``activation(gate) * up``, or ``activation(up)`` in a layer of experts without a gate.

        >>> Activation("situ", beta=4.0, linear_beta=25.0).function
        'situ(beta=4.0,linear_beta=25.0)'

    Attributes:
        name: "silu": x * sigmoid(x). "gelu": x * (1 + erf(x / sqrt(2))) / 2. "gelu_tanh": x * (1 + tanh(sqrt(2 / pi) * (x +
            0.044715 x^3))) / 2. "relu": max(x, 0). "relu2": max(x, 0)^2. "swiglu_oai" (gpt-oss, MiniMax-M3): x * sigmoid(alpha
            x), times up + 1. "situ" (Kimi-K3): beta * tanh(x / beta) * sigmoid(x), times linear_beta * tanh(up / linear_beta);
            the ``SituAndMul`` of vLLM and of the model's own code.
        limit: clamps the gate to at most ``limit``, and up to [-limit, limit], before the activation, as DeepSeek-V4 and
            gpt-oss do. None does not clamp.
        alpha: slope of "swiglu_oai"; None for 1.702.
        beta: bound of the gate for "situ"; None for 1.
        linear_beta: bound of up for "situ"; None does not bound it.

    Raises:
        ValueError: the name is unknown, a constant belongs to another activation or is not from 1e-4 to 1e4, or the limit is
            not positive.
    """

    name: ActivationName = "silu"
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None
    linear_beta: float | None = None
    function: str = field(init=False, repr=False, compare=False)
    """The text of the function, without its limit."""

    def __post_init__(self):
        if self.name not in NAMES:
            known = ", ".join(f'"{name}"' for name in NAMES)
            raise ValueError(f"activation={self.name!r} is unknown; use one of {known}")
        check_limit(self.limit)
        own = CONSTANTS.get(self.name, {})
        for constant in ("alpha", "beta", "linear_beta"):
            value = getattr(self, constant)
            if value is None:
                object.__setattr__(self, constant, own.get(constant))
            elif constant not in own:
                owner = next(name for name, constants in CONSTANTS.items() if constant in constants)
                raise ValueError(
                    f"{constant}={value!r} is a constant of {owner!r}; leave it out for {self.name!r}"
                )
            elif isinstance(value, bool) or not isinstance(value, int | float) or not LEAST <= value <= MOST:
                raise ValueError(f"{constant}={value!r:.20} is not a number from {LEAST:g} to {MOST:g}")
        told = [f"{c}={float(v)!r}" for c, default in own.items() if (v := getattr(self, c)) != default]
        object.__setattr__(self, "function", f"{self.name}({','.join(told)})" if told else self.name)


# Records of all texts that were parsed. A dict, because torch.compile traces reads of it, but not an lru_cache.
_records: dict[str, Activation] = {name: Activation(name) for name in NAMES}
SILU = _records["silu"]


def parse(function: Any) -> Activation:
    """Returns the activation of a text. Raises ValueError for anything that is not a text of an activation."""
    if not isinstance(function, str):
        return Activation(function)
    if function not in _records:
        name, _, rest = function.partition("(")
        try:
            pairs = (pair.partition("=") for pair in rest[:-1].split(",") if rest)
            constants: dict[str, Any] = {constant.strip(): float(value) for constant, _, value in pairs}
            record = Activation(name, **constants)  # type: ignore[arg-type]
        except TypeError as error:  # a constant that no activation has
            raise ValueError(f"activation={function!r}: {error}") from None
        _records[function] = _records[record.function] = record
    return _records[function]


def activation_of(activation: Any, limit: float | None = None) -> Activation:
    """Converts an ``Activation``, or its text, to an ``Activation``. A ``limit`` replaces that of the record.

    Raises TypeError for other types, and ValueError for an unknown name.
    """
    if isinstance(activation, str):
        activation = parse(activation)
    if not isinstance(activation, Activation):
        raise TypeError(
            f'activation={activation!r} is not an Activation; pass nvfp4_cute.Activation("silu"), or its name'
        )
    check_limit(limit)
    return activation if limit is None else replace(activation, limit=limit)


def symbol(function: str) -> str:
    """Converts the text to characters that a kernel's name can have."""
    return function.translate(
        {ord(a): b for a, b in zip("(=,).-+", ("_", "", "_", "", "p", "m", ""), strict=True)}
    )
