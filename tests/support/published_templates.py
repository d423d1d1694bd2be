"""Chat templates with the rules of published ones: what they refuse, and what they leave out without a word.

They are our own, and shorter; the rules are those of the templates that the models' publishers give.
"""

# One system message at the beginning, a message of the user somewhere; results of tools are the user's.
QWEN35 = """
{%- if not messages %}{{- raise_exception('No messages provided.') }}{%- endif %}
{%- for tool in tools or [] %}{{- '<tool>' + tool.function.name + '</tool>' }}{%- endfor %}
{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
        {{- '<|im_start|>system\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}{{- '<|im_start|>user\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call><function=' + call.function.name + '>' }}
            {%- for name, value in call.function.arguments | items %}{{- name + '=' + value | string }}{%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}{{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}{{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# User and assistant take turns, calls and their results apart; the system message is the first, or there is none.
MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set turns = namespace(index=0) %}
{%- for message in rest %}
    {%- if message.role in ('user', 'assistant') and not message.tool_calls %}
        {%- if (message.role == 'user') != (turns.index % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate user and assistant roles except for tool calls') }}
        {%- endif %}
        {%- set turns.index = turns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}{%- if system %}{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}{%- endif %}
{%- for tool in tools or [] %}{{- '[TOOL]' + tool.function.name }}{%- endfor %}
{%- for message in rest %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}
        {{- message.content }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be 9 characters.') }}{%- endif %}
            {{- '[TOOL_CALLS]' + call.function | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}{{- message.content + eos_token }}
    {%- else %}{{- raise_exception('Only user, assistant and tool roles are supported.') }}
    {%- endif %}
{%- endfor %}
"""

# Gemma 2: no system message, no tools, strict turns.
GEMMA2 = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

# Gemma 3: the system message begins the user's first; else as Gemma 2.
GEMMA3 = """
{{- bos_token }}
{%- set before = '' %}{%- set rest = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set before = messages[0]['content'] + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + (before if loop.first else '') + message['content'] | trim }}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

# gpt-oss: the first system message is the developer's; later ones are left out without a word.
GPT_OSS = """
{%- if messages[0].role in ('developer', 'system') %}
    {%- set developer = messages[0].content %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- if developer or tools %}
    {{- '<|start|>developer<|message|>' + (developer or '') }}
    {%- for tool in tools or [] %}{{- 'type ' + tool.function.name + ' = () => any;' }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in rest %}
    {%- if message.role == 'assistant' %}
        {%- if message.tool_calls %}
            {%- set last.name = message.tool_calls[0].function.name %}
            {%- if message.content %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + message.content + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}
            {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {%- set last.name = none %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if not last.name %}{{- raise_exception('a tool message without a tool call before it') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""

# Takes everything, as most do.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEMPLATES = {
    "Qwen3.5": QWEN35,
    "Mistral": MISTRAL,
    "Gemma 2": GEMMA2,
    "Gemma 3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "ChatML": CHATML,
}
