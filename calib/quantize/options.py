"""Whether experts are stored in rotated coordinates: the names of the choices, and the option of commands."""

from typing import Literal, get_args

from moe_pack.formats import option

Rotate = Literal["off", "on"]
RotateChoice = Literal["auto", "off", "on"]

_ROTATE_HELP = (
    "Whether experts are stored in rotated coordinates, which spreads single huge weights over their rows. It pays at "
    "few bits; decoding takes two short transforms more a layer."
)
ROTATE_OPTION = option("--rotate", choices=get_args(Rotate), help=_ROTATE_HELP)
ROTATE_CHOICE_OPTION = option(
    "--rotate",
    choices=get_args(RotateChoice),
    help=f"{_ROTATE_HELP} auto rotates the layers that the profile has found to lose less with it, where experts have "
    "less than 8 bits; none without a profile. Experts in FP8 or MXFP4 codes of the checkpoint cannot be rotated.",
)
