"""Whether a text follows a grammar, token by token, in the demonstration model's tokens."""

import math

import torch

from moe_pack.formats.families.checkpoint_files import FolderFiles
from moe_pack.runtime import Text
from moe_pack.runtime.serve.grammars import TokenGrammar
from support.models import DEMO_MODEL

PADDED = 4096 + 40  # a model may have more logits than its tokenizer has tokens
TEXT = Text(FolderFiles(DEMO_MODEL))


def follow(grammar: TokenGrammar, text: str) -> bool:
    """Goes through a text; whether every token is allowed, and the text is whole at the end."""
    for token in TEXT.encode(text, special_tokens=False):
        if not math.isfinite(float(grammar.allow(torch.zeros(PADDED))[token])):
            return False
        grammar.accept(token)
    return grammar.is_complete
