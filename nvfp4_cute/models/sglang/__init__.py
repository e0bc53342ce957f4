"""SGLang plug-in that serves NVFP4 checkpoints of ModelOpt. SGLang finds it by the entry point group ``sglang.srt.plugins``.

Install this package next to SGLang and run ``sglang serve --model-path FOLDER-NVFP4``. ``SGLANG_PLUGINS=none`` loads no plug-in.
"""

import logging
from importlib import import_module

QUANTIZATION = "sglang.srt.layers.quantization"
LINEAR = "sglang.srt.layers.linear"
METHOD = "modelopt_fp4"
"""SGLang's name for NVFP4 checkpoints of ModelOpt."""


def register() -> None:
    """Replaces SGLang's method for NVFP4 checkpoints. SGLang calls this in each of its processes.

    If the installed SGLang lacks something that the plug-in needs, logs an error and leaves SGLang's own method in place.
    """
    try:
        methods, linear = import_module(QUANTIZATION), import_module(LINEAR)
        own = import_module("nvfp4_cute.models.sglang.methods")
        tables = [methods.BASE_QUANTIZATION_METHODS, methods.QUANTIZATION_METHODS]
        loaders = linear.WEIGHT_LOADER_V2_SUPPORTED
    except (ImportError, AttributeError) as error:
        # A child of SGLang's logger, whose handlers print the message.
        logging.getLogger("sglang.nvfp4_cute").error(
            "nvfp4_cute: this SGLang lacks what the plug-in needs (%s); NVFP4 checkpoints go to SGLang's own kernels",
            error,
        )
        return
    for table in tables:
        table[METHOD] = own.NVFP4Config
    if own.NVFP4LinearMethod.__name__ not in loaders:
        loaders.append(own.NVFP4LinearMethod.__name__)
