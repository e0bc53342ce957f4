"""Reads a record of a kernel's operands from its launch table, each field from the column of its name."""

from dataclasses import fields
from typing import Any

import cutlass.cute as cute
from cutlass import Int64


def read_record(record: type, columns: Any, table: cute.Tensor, **given: Any) -> Any:
    """Returns a ``record`` with each field in its own type.

    Args:
        record: dataclass whose fields are Int64 (addresses), or Int32 and Uint32 (extents).
        columns: columns of the table, an IntEnum of ``launch_table``; field ``x_pitch`` is in column ``X_PITCH``.
        table: Int64 [column].
        given: fields that the table does not have as they are.
    """
    for field in fields(record):
        if field.name not in given:
            value = table[columns[field.name.upper()]]
            given[field.name] = value if field.type is Int64 else field.type(value)
    return record(**given)
