"""Types of command line arguments (argparse's ``type=``): convert text to a value, or raise an error that explains the fault."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvfp4_cute.formats.block_format import Formats


def whole(text: str) -> int:
    """Converts to an integer."""
    try:
        return int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a whole number") from None


def positive(text: str) -> int:
    """Converts to an integer above 0."""
    value = whole(text)
    if value < 1:
        raise ArgumentTypeError(f"{value} is not positive")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Converts comma-separated integers above 0."""
    return tuple(map(positive, text.split(",")))


def sizes(text: str) -> tuple[int, ...]:
    """Converts comma-separated rows of groups: not negative, and not all 0."""
    values = tuple(map(whole, text.split(",")))
    if min(values) < 0:
        raise ArgumentTypeError(f"{min(values)} is negative")
    if not any(values):
        raise ArgumentTypeError(f"{text} has no row at all")
    return values


def formats(text: str) -> "Formats":
    """Converts two comma-separated names of formats, for ``a`` and ``b``, or one name for both."""
    from nvfp4_cute.formats.block_format import format_named

    names = text.split(",")
    if len(names) > 2:
        raise ArgumentTypeError(f"{text!r} names {len(names)} formats; give one, or that of a and that of b")
    try:
        return format_named(names[0]), format_named(names[-1])
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def activation(text: str) -> str:
    """Returns the text of an activation."""
    from nvfp4_cute.activation import parse

    try:
        return parse(text).function
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def input_file(text: str) -> Path:
    """Returns the path of a file that exists."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def output_file(text: str) -> Path:
    """Returns the path of a file to write, in a folder that exists. Checked before the work begins."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {path.parent}")
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder; name a file")
    return path


def output_folder(text: str) -> Path:
    """Returns the path of a folder, which need not exist."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise ArgumentTypeError(f"{text} is a file; name a folder")
    return path


def device(text: str) -> str:
    """Returns a torch device that is available."""
    import torch

    try:
        found = torch.device(text)
    except RuntimeError:
        raise ArgumentTypeError(f"{text!r} is not a torch device; use cpu, cuda, cuda:1 and so on") from None
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        here = f"{count} GPUs here, from cuda:0 on" if count else "no GPU here: pass cpu"
        raise ArgumentTypeError(f"{text} is not there; torch sees {here}")
    return text


def sizes_by_axis(text: str) -> dict[str, tuple[int, ...]]:
    """Parses sizes of axes, ``N=256,K=512,M=1:16``, with colons between several sizes of one axis.

    A size may be a pair, ``8+16``.
    """
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split(","):
        name, equals, values = part.partition("=")
        if not equals:
            raise ArgumentTypeError(f"{part!r} is not of the form AXIS=SIZE")
        found[name.strip()] = tuple(map(_size, values.split(":")))
    return found


def _size(text: str):
    return tuple(map(positive, text.split("+"))) if "+" in text else positive(text)


def refuse_given(args: Namespace, options: Sequence[str], why: Callable[[str], str]) -> None:
    """Raises ValueError for the first of these options that was given. ``why`` maps its name, as typed, to the message."""
    for option in options:
        if getattr(args, option):
            raise ValueError(why(option.replace("_", "-")))


def add_shape(parser: ArgumentParser, rows: Callable[[str], tuple[int, ...]]) -> None:
    """Adds ``--m``, ``--n``, ``--k`` and ``--groups``.

    ``rows``: the type of ``--m``, which decides whether a group may be empty.
    """
    parser.add_argument("--m", type=rows, metavar="M[,M...]", help="rows of a group, or of each group")
    parser.add_argument("--n", type=positive, help="columns of C")
    parser.add_argument("--k", type=positive, help="the dimension that is summed over")
    parser.add_argument("--groups", type=positive, help="groups (default: as many as --m lists)")


def add_formats(parser: ArgumentParser, of: str, default: str | None = None) -> None:
    """Adds ``--formats``. ``of``: operands named in its help. ``default``: as typed, or None."""
    parser.add_argument(
        "--formats",
        type=formats,
        default=default,
        metavar="A[,B]",
        help=f"formats {of}, such as mxfp8_e4m3,mxfp4 (default nvfp4)",
    )
