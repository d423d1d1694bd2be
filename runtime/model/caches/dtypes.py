"""Names of the ways to store keys and values, for options; storage.py has the formats."""

from typing import Literal

KvDtype = Literal["f32", "bf16", "q8", "q4"]
