"""Names of kernels as their authors chose them, extracted from the names that CuTe DSL generates."""

import re

NAME_CHARACTERS = 40


def short_name(kernel: str, characters: int = NAME_CHARACTERS) -> str:
    """Returns the part of a mangled kernel name that its author chose: function, or class of the kernel object."""
    text = re.sub(r"^kernel_cutlass_", "", kernel)
    for pattern in (
        r"^(\w+?)_kernel_cutlass_",  # with a prefix of its own
        r"^\w*?___?main__(\w+?)_object_at",
        r"^(\w+?)_(?:tensor|Tensor|TiledMMA|CopyAtom|__main__)",
    ):
        found = re.match(pattern, text)
        if found:
            text = found.group(1)
            break
    return text if len(text) <= characters else text[: characters - 1] + "…"
