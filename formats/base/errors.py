"""The errors that a user can meet. A message is one line: *place: what is wrong, found X, expected Y; what to do*."""

_MOST_SHOWN = 60  # characters of a value in a message


def shortened(value: object) -> str:
    """Returns a value as a message shows it: as Python writes it, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


class MoePackError(Exception):
    """The root of all errors of ours. The command line alone catches it, prints one line and exits with 1."""


class CheckpointError(MoePackError):
    """The checkpoint: missing or damaged files, unknown architecture, wrong tensors."""


class PackError(MoePackError):
    """The pack: damaged, unfinished, or of another version."""


class PlanError(MoePackError):
    """The plan: widths, groups or selector kinds that the format or the model does not allow."""


class ConversionError(MoePackError):
    """The output folder: not empty, in use, or full."""


class PartBusyError(ConversionError):
    """Another process makes the same part in the folder, or a machine that died has not lost its lock yet."""


class RunError(MoePackError):
    """The run: prompt, context, device, template."""


class UsageError(MoePackError):
    """Options that contradict each other or miss one; the command line exits with 2."""
