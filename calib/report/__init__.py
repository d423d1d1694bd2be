"""A profile as a page to read."""

from moe_pack.calib.report.page import measured_pack, report_html

__all__ = [
    "measured_pack",
    "report_html",
]
