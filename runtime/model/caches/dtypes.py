"""The names of the ways to store keys and values, which options have too; storage.py says how each is stored."""

from typing import Literal

KvDtype = Literal["f32", "bf16", "q8", "q4"]
