"""Finds the transformers class with which a checkpoint's model is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints.folders import local_folder

CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
)  # the first class that knows the model is used


def auto_class(folder: str | Path, options: Mapping[str, Any] | None = None) -> Any:
    """Returns the class of ``CLASSES`` that knows the model.

    Args:
        folder: folder of the checkpoint, or its name on the hub.
        options: arguments of ``from_pretrained``.

    Raises:
        CheckpointError: no class knows the model.
    """
    import transformers

    given = dict(options or {})
    config = given.get("config")
    if config is None:
        names = ("trust_remote_code", "revision", "subfolder", "token", "cache_dir", "local_files_only")
        own = {name: given[name] for name in names if name in given}
        config = transformers.AutoConfig.from_pretrained(local_folder(folder), **own)
    remote = getattr(config, "auto_map", None) or {}
    classes = [getattr(transformers, name) for name in CLASSES]
    for one in classes:
        if type(config) in one._model_mapping or one.__name__ in remote:
            return one
    raise CheckpointError(
        f"{folder} is a {type(config).__name__}, which none of {', '.join(CLASSES)} knows; pass model_class, the class of "
        f"transformers that config.json names under architectures ({', '.join(config.architectures or ['none'])})"
    )
