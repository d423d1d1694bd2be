"""The demo model as one that chats: its checkpoint with a chat template in ChatML's form, with tools."""

import shutil
from pathlib import Path

from support.models import DEMO_MODEL

CHAT_TEMPLATE = """\
{%- set first = messages[0].content if messages[0].role == 'system' else '' %}
{%- if first or tools %}
    {{- '<|im_start|>system\\n' + first }}
    {%- if tools %}
        {{- '\\nTools:\\n' }}
        {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
        {{- 'Call a tool with <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages if message.role != 'system' %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def chat_source(folder: Path) -> Path:
    """Writes the checkpoint of the demo model with the template to a new folder, and returns it."""
    shutil.copytree(DEMO_MODEL, folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder
