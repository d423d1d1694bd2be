"""Text: to tokens and back, and conversations in a model's chat template."""

from moe_pack.runtime.text.chat import ChatPrompt, ChatTemplate, chat_prompt, prompt_of
from moe_pack.runtime.text.tokens import Text, TextStream, check_text

__all__ = ["ChatPrompt", "ChatTemplate", "Text", "TextStream", "chat_prompt", "check_text", "prompt_of"]
