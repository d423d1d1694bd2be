"""GGUF files, the format of llama.cpp, read as checkpoints of our families."""

from moe_pack.formats.gguf.files import GgufFiles, find_gguf

__all__ = ["GgufFiles", "find_gguf"]
