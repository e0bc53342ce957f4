"""vLLM serves NVFP4 checkpoints with these kernels: the plug-in that vLLM finds by the entry point ``vllm.general_plugins``.

With this package installed beside vLLM nothing else is to be done: ``vllm serve FOLDER-NVFP4``. ``--quantization modelopt_fp4``
and the other names of vLLM's own keep their meaning, and ``VLLM_PLUGINS=`` loads no plug-in at all.
"""

import logging

from nvfp4_cute.models.vllm.requirements import faults

NAME = "nvfp4_cute"


def register() -> None:
    """What vLLM calls in each of its processes: make the method known. Doing it again changes nothing.

    Where the installed vLLM lacks what this needs, it says so in the log and vLLM goes on without it.
    """
    found = faults()
    if found:
        # A name below vLLM's own: its handlers print it.
        logging.getLogger(f"vllm.{NAME}").error("%s", found)
        return
    from nvfp4_cute.models.vllm.config import register_config

    register_config(NAME)
