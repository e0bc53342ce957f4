"""The plug-in with which vLLM serves 4-bit checkpoints; vLLM finds it by the entry point ``vllm.general_plugins``.

With this package and vLLM installed, run ``vllm serve FOLDER-NVFP4``. ``--quantization modelopt_fp4`` and vLLM's other names
keep their meaning, and ``VLLM_PLUGINS=`` loads no plug-in at all.
"""

import logging

from nvfp4_cute import env
from nvfp4_cute.batch_invariance import set_batch_invariant
from nvfp4_cute.models.vllm.requirements import faults
from nvfp4_cute.models.vllm.taken import NAME


def register() -> None:
    """Registers the method. vLLM calls this in each of its processes; further calls change nothing.

    If the installed vLLM lacks something that the plug-in needs, the log says so and vLLM continues without it.
    """
    found = faults()
    if found:
        # The name is below vLLM's own logger, whose handlers print the message.
        logging.getLogger(f"vllm.{NAME}").error("%s", found)
        return
    from nvfp4_cute.models.vllm.config import register_config

    register_config(NAME)
    if env.is_vllm_batch_invariant():
        set_batch_invariant()
