"""The profile: a folder with what calibration measured of a model, and the losses that follow from it."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.profile.imatrix import dense_entries, profile_of_imatrix, read_imatrix, write_imatrix
    from moe_pack.calib.profile.losses import Losses, assumed_losses, losses_of
    from moe_pack.calib.profile.merging import merge_profiles, texts_of
    from moe_pack.calib.profile.options import ProfileOptions
    from moe_pack.calib.profile.profiler import attach, make_profile, most_routing_bytes, routing_of
    from moe_pack.calib.profile.profiles import Profile, check_same_source, hottest_first
else:
    __getattr__ = face(__name__)

__all__ = [
    "Losses",
    "Profile",
    "ProfileOptions",
    "assumed_losses",
    "attach",
    "check_same_source",
    "dense_entries",
    "hottest_first",
    "losses_of",
    "make_profile",
    "merge_profiles",
    "most_routing_bytes",
    "profile_of_imatrix",
    "read_imatrix",
    "routing_of",
    "texts_of",
    "write_imatrix",
]
