"""Stands in for vLLM, from which SGLang imports one function that it does not call on a CPU."""


def rotary_embedding(*_):
    """Is imported, not called."""
    raise NotImplementedError
