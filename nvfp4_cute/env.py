"""The only reader of the process environment: every variable with its default and effect.

Variables are read when they are used, not at import, so a test or a caller can set them at any time.
"""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BACKENDS = ("auto", "cuda", "emulator", "reference")


def _get(name: str) -> str | None:
    """Returns a variable or None. Ten times as fast as ``os.environ.get`` for missing names, which every launch looks up."""
    value = _environ.get(os.environ.encodekey(name))
    return None if value is None else os.environ.decodevalue(value)


# The encoded dict inside os.environ.
_environ: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name, effect: shown to users.
        default: the value if it is unset or empty.
        choices: possible values; empty for free text of a ``kind``.
        kind: "a path" or "an address".
    """

    name: str
    default: str
    effect: str
    choices: tuple[str, ...] = ()
    kind: str = "a path"

    def read(self) -> str:
        """Returns the value in force.

        Raises: ValueError if the environment holds something that is not one of `choices`.
        """
        value = _get(self.name) or self.default
        if self.choices and value not in (*self.choices, self.default):
            raise ValueError(
                f"{self.name}={value!r} is not one of {', '.join(self.choices)}; unset it or choose one"
            )
        return value


BACKEND = Variable(
    name="NVFP4_CUTE_BACKEND",
    default="auto",
    effect='where an operation called with backend="auto" runs; auto means by the device of its tensors',
    choices=BACKENDS,
)
CUTLASS = Variable(
    name="NVFP4_CUTE_CUTLASS",
    default="",
    effect="folder of a CUTLASS checkout, whose examples the long tests then run on the emulator",
)
# Encoded once, because every launch looks it up.
_BACKEND_KEY = os.environ.encodekey(BACKEND.name)
PREFIX = "NVFP4_CUTE_"
CACHE_OFF = "off"
CACHE_DIR = Variable(
    name="NVFP4_CUTE_CACHE_DIR",
    default="~/.cache/nvfp4_cute",
    effect=f"folder of compiled kernels, which may be read-only; `{CACHE_OFF}` keeps none on disk",
)
ACTIVATIONS = Variable(
    name="NVFP4_CUTE_ACTIVATIONS",
    default="",
    effect="activations of 4-bit checkpoints in vLLM and SGLang, instead of those in config.json, which default to auto",
    choices=("auto", "4bit", "4over6", "per_row", "fp8", "16bit"),
)
POPCORN_API = Variable(
    name="POPCORN_API_URL",
    default="https://site--bot--dxfjds728w5v.code.run",
    effect="GPU MODE's server of competitions, as popcorn-cli reads it; `nvfp4-cute submit` asks it which leaderboards are open",
    kind="an address",
)
VARIABLES = (BACKEND, CUTLASS, CACHE_DIR, ACTIVATIONS, POPCORN_API)


def backend() -> str:
    """Returns the backend for backend="auto": "auto" unless NVFP4_CUTE_BACKEND names another one.

    Raises: ValueError if NVFP4_CUTE_BACKEND is not a backend.
    """
    return BACKEND.default if _environ.get(_BACKEND_KEY) is None else BACKEND.read()


def activations() -> str:
    """Returns the value of NVFP4_CUTE_ACTIVATIONS, "" if unset.

    Raises: ValueError if it holds another word.
    """
    return ACTIVATIONS.read()


def is_vllm_batch_invariant() -> bool:
    """Return whether vLLM is told to be batch-invariant (VLLM_BATCH_INVARIANT=1)."""
    return _get("VLLM_BATCH_INVARIANT") == "1"


def vllm_plugins() -> list[str] | None:
    """Returns the plug-ins that vLLM should load (VLLM_PLUGINS); None if it loads all."""
    return _names("VLLM_PLUGINS")


def sglang_plugins() -> list[str] | None:
    """Returns the plug-ins that SGLang should load (SGLANG_PLUGINS); None if it loads all, as for an empty value."""
    return _names("SGLANG_PLUGINS") if _get("SGLANG_PLUGINS") else None


def _names(variable: str) -> list[str] | None:
    value = _get(variable)
    return None if value is None else [name.strip() for name in value.split(",")]


def with_variables(values: dict[str, str]) -> dict[str, str]:
    """Returns this process's environment with some values replaced, for a child."""
    return {**os.environ, **values}


def set_for_engine(values: dict[str, str]) -> None:
    """Sets variables that another library of this process reads, such as vLLM. Call it before the library is imported."""
    os.environ.update(values)


def disable_torch_caching() -> None:
    """Gives every CUDA tensor of this process its own allocation. Call it before torch makes the first one."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"


def disable_multicast() -> None:
    """Makes torch's symmetric memory in this process use only pointers. Call it before the first allocation."""
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"


def python_path(folders: list[str]) -> str:
    """Returns PYTHONPATH with folders prepended."""
    return os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])


def user_data_dir() -> Path:
    """Returns the folder for user data: in XDG_DATA_HOME, or ~/.local/share."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "nvfp4_cute"


def cache_dir() -> Path | None:
    """Returns the folder of compiled kernels; None if they are not stored.

    Unless NVFP4_CUTE_CACHE_DIR names a folder, it is in XDG_CACHE_HOME, or ~/.cache.
    """
    value = CACHE_DIR.read()
    if value == CACHE_OFF:
        return None
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches and not os.environ.get(CACHE_DIR.name):
        return Path(caches) / "nvfp4_cute"
    try:
        return Path(value).expanduser()
    except RuntimeError:  # the user has no home
        return None


def folders_below(folder: Path) -> dict[str, str]:
    """Returns variables that put temporary files, and caches of torch, Triton and CUDA, below a folder; creates the first."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    places = ("TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
    return {"TMPDIR": str(temporary)} | {name: str(folder / "caches" / name.lower()) for name in places}


def become_submission(folder: Path | None) -> None:
    """Gives this process the environment of a submission: without variables of a competition's runner, files below `folder`."""
    for name in [name for name in os.environ if name.startswith("POPCORN_")]:
        del os.environ[name]
    if folder is not None:
        os.environ.update(folders_below(folder))
        tempfile.tempdir = None  # recomputed on the next use


def hub_cache() -> Path:
    """Returns the folder of downloads of the Hugging Face hub's own library (huggingface_hub, constants.py)."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()


def take_popcorn_fd() -> int | None:
    """Returns the descriptor for results to a competition's runner, or None, and removes it, so that children do not see it."""
    value = os.environ.pop("POPCORN_FD", "")
    return int(value) if value else None


def take_popcorn_seed() -> int | None:
    """Returns the secret seed of a competition's runner, or None, and removes it, so that a submission cannot read it."""
    value = os.environ.pop("POPCORN_SEED", "")
    return int(value) if value else None


def popcorn_api_url() -> str:
    """Returns the address of the competitions' server, without a trailing slash."""
    return POPCORN_API.read().rstrip("/")


def cutlass_checkout() -> Path | None:
    """Returns the folder that NVFP4_CUTE_CUTLASS names; None if it is not set."""
    value = CUTLASS.read()
    return Path(value).expanduser() if value else None


def describe() -> str:
    """Describes every variable for users: name, current value, choices, default, and effect; also misspelled ones."""
    lines = []
    for variable in VARIABLES:
        setting = os.environ.get(variable.name)
        lines.append(f"{variable.name}={setting}" if setting else f"{variable.name} (not set)")
        lines.append(f"    {variable.effect}")
        if variable.choices:
            lines.append(f"    one of {', '.join(variable.choices)}; default {variable.default or 'none'}")
        else:
            lines.append(f"    {variable.kind}; default {variable.default or 'none'}")
    return "\n".join([*lines, *unknown()])


def unknown() -> list[str]:
    """Returns one line per set variable with our prefix that does not exist."""
    known = {variable.name for variable in VARIABLES}
    names = sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)
    return [
        f"{name} is set, and nothing reads it: see nvfp4-cute doctor --verbose for those that are read"
        for name in names
    ]
