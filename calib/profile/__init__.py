"""The profile: a folder with what calibration measured of a model, and the losses that follow from it."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.profile.imatrix import dense_entries, profile_of_imatrix, read_imatrix, write_imatrix
    from moe_pack.calib.profile.losses import Losses, assumed_losses, losses_of
    from moe_pack.calib.profile.merging import merge_profiles, texts_of
    from moe_pack.calib.profile.options import ProfileOptions
    from moe_pack.calib.profile.profiler import attach, make_profile
    from moe_pack.calib.profile.profiles import Profile, hottest_first
else:
    __getattr__ = face(__name__)
