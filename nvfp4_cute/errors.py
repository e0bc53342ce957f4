"""Exceptions. Every message names the violated rule, the offending value, and what to do instead."""


def printable(text: str, keep: str = "") -> str:
    """Escapes characters that might control a terminal: every unprintable one except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


class UnsupportedProblem(ValueError):
    """The operands are well formed but describe something that no kernel here computes."""


class UnsupportedTarget(RuntimeError):
    """There is no kernel for the requested GPU or architecture."""


class ConfigError(ValueError):
    """A KernelConfig that cannot be built, because it breaks a hardware limit or contradicts itself."""


class CacheError(RuntimeError):
    """A compiled-kernel cache entry or an exported object cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint's tensor is missing, damaged, of another size, or unknown to its reader.

    The message contains names from files, so control characters in it are escaped.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))


class EmulatorError(RuntimeError):
    """The emulated program broke a rule of the machine, hung, or used an instruction that is not modelled."""


class RankError(RuntimeError):
    """A rank of a group refused its operands, passed operands that contradict those of other ranks, or did not call in time."""
