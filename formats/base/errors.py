"""The errors that a user can meet, in one tree.

    MoePackError                the root; the command line prints it as one line and exits with 1
    ├── CheckpointError         the checkpoint: missing or damaged files, unknown architecture, wrong tensors
    ├── PackError               the pack: damaged, unfinished, or of another version
    ├── PlanError               the plan: widths, groups or selector kinds that the format or the model does not allow
    ├── ConversionError         the output folder: not empty, in use, or full
    │   └── PartBusyError       another process makes the same part there
    ├── RunError                the run: prompt, context, device, template
    └── UsageError              options that contradict each other or miss one; the command line exits with 2

A message is one line: *place: what is wrong, found X, expected Y; what to do*.
"""

_MOST_SHOWN = 60  # characters of a value in a message


def shortened(value: object) -> str:
    """Returns a value as a message shows it: as Python writes it, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


class MoePackError(Exception):
    """The root of the tree. Only the command line catches it."""


class CheckpointError(MoePackError):
    """The checkpoint cannot be read, or is of a kind that we cannot pack."""


class PackError(MoePackError):
    """The pack is damaged, unfinished, or written for another version."""


class PlanError(MoePackError):
    """The plan asks for something that the format or the model does not allow."""


class ConversionError(MoePackError):
    """The output folder cannot take the conversion."""


class PartBusyError(ConversionError):
    """Another process makes the same part in the folder, or a machine that died has not lost its lock yet."""


class RunError(MoePackError):
    """The run asks for something that the runtime cannot do."""


class UsageError(MoePackError):
    """Options of a command contradict each other, or an option that they need is missing."""
