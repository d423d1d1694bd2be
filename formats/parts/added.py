"""Fields that a later version added to our dataclasses, without a change to the files of earlier ones."""

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")
_ADDED = "added"  # in a field's metadata
ADDED = {_ADDED: True}  # the metadata, for a field that has other metadata too


def added(default: T) -> T:
    """Declares a dataclass field that a later version added: its key is written only if the value is not `default`.

    Older files stay readable and are written with the same bytes; older readers refuse the new key.
    """
    return dataclasses.field(default=default, metadata=ADDED)


def is_added(field: dataclasses.Field[Any]) -> bool:
    """Returns whether a field was declared with `added`."""
    return bool(field.metadata.get(_ADDED))
