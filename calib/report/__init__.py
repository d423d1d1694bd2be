"""A profile as a page to read."""

from typing import TYPE_CHECKING

from moe_pack.formats.base.faces import face

if TYPE_CHECKING:
    from moe_pack.calib.report.page import measured_pack, report_html
else:
    __getattr__ = face(__name__)

__all__ = [
    "measured_pack",
    "report_html",
]
