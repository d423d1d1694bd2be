"""Every error a user can meet, in one tree.

    MoePackError                anything we raise on purpose; the command line prints it as one line, exit code 1
    ├── CheckpointError         the source: missing or damaged files, unknown architecture, tensors that do not fit
    ├── PackError               the pack: damaged, foreign, unfinished
    ├── PlanError               what was asked for cannot be built: widths, groups, selector kinds
    ├── ConversionError         the output folder: taken, in use, full
    ├── RunError                what was asked of the runtime: prompt, context, device, template
    └── UsageError              options that do not go together; the command line ends with exit code 2

Messages read *place: found X, expected Y; what to do*, in one line.
"""


class MoePackError(Exception):
    """Root of the tree: caught once, at the command line."""


class CheckpointError(MoePackError):
    """The checkpoint cannot be read, or is not one we know how to pack."""


class PackError(MoePackError):
    """The pack is damaged, unfinished, or written for another version."""


class PlanError(MoePackError):
    """The options ask for something the format or the model does not allow."""


class ConversionError(MoePackError):
    """The output folder cannot take the conversion."""


class RunError(MoePackError):
    """The runtime was asked for something it cannot do."""


class UsageError(MoePackError):
    """Options of a command do not go together, or lack one that they need."""
