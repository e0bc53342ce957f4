"""SGLang plug-in that serves NVFP4 checkpoints of ModelOpt and of compressed-tensors.

SGLang finds it by the entry point group ``sglang.srt.plugins``.

Install this package next to SGLang and run ``sglang serve --model-path FOLDER-NVFP4``. ``SGLANG_PLUGINS=none`` loads no plug-in.
"""

import logging
from importlib import import_module

QUANTIZATION = "sglang.srt.layers.quantization"
LINEAR = "sglang.srt.layers.linear"
METHODS = {
    "modelopt_fp4": "ModelOptConfig",
    "modelopt_mixed": "MixedConfig",
    "compressed-tensors": "CompressedConfig",
}
"""Class of ``methods`` by SGLang's name for the checkpoints."""


def faults() -> str:
    """Returns what the installed SGLang lacks for the plug-in, "" for nothing. Imports SGLang."""
    try:
        import_module("nvfp4_cute.models.sglang.methods")
        _tables(), _loaders()
    except (ImportError, AttributeError) as error:
        return f"this SGLang lacks what the plug-in needs ({error})"
    return ""


def _tables() -> list[dict[str, type]]:
    """Returns SGLang's tables of quantization methods."""
    methods = import_module(QUANTIZATION)
    return [methods.BASE_QUANTIZATION_METHODS, methods.QUANTIZATION_METHODS]


def _loaders() -> list[str]:
    """Returns SGLang's list of linear methods whose parameters load themselves."""
    return import_module(LINEAR).WEIGHT_LOADER_V2_SUPPORTED


def register() -> None:
    """Replaces SGLang's methods for NVFP4 checkpoints. SGLang calls this in each of its processes.

    If the installed SGLang lacks something that the plug-in needs, logs an error and leaves SGLang's own method in place.
    """
    missing = faults()
    if missing:
        # A child of SGLang's logger, whose handlers print the message.
        logging.getLogger("sglang.nvfp4_cute").error(
            "nvfp4_cute: %s; NVFP4 checkpoints go to SGLang's own kernels", missing
        )
        return
    own, loaders = import_module("nvfp4_cute.models.sglang.methods"), _loaders()
    for table in _tables():
        table.update({name: getattr(own, config) for name, config in METHODS.items()})
    if own.NVFP4LinearMethod.__name__ not in loaders:
        loaders.append(own.NVFP4LinearMethod.__name__)
