"""Chat templates in the styles of published model families, in our own words, and conversations to put into them."""

from __future__ import annotations

from typing import Any

SPECIAL = [
    "<s>", "</s>", "<unk>",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>",
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>",
    "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
    "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
    "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>",
]  # fmt: skip
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

CHATML = """\
{% for m in messages -%}
    {% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
    {% set preamble = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
    {% set turns = messages[1:] %}
{% else %}
    {% set preamble = '' %}
    {% set turns = messages %}
{% endif %}
{% for turn in turns %}
    {% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('after the system message, user and assistant must take turns') }}
    {% endif %}
    {% if turn['role'] == 'user' %}
        {{- bos_token + '[INST] ' + (preamble if loop.first else '') + turn['content'] | trim + ' [/INST]' }}
    {%- elif turn['role'] == 'assistant' %}
        {%- generation %}{{ ' ' + turn['content'] | trim + ' ' + eos_token }}{% endgeneration %}
    {% endif %}
{% endfor %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- set ns = namespace(first=true) %}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if ns.first and tools %}
        {{- 'Functions that you may call, as JSON:\\n' }}
        {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {%- endif %}
    {%- set ns.first = false %}
    {%- if m.content is string %}
        {{- m.content | trim }}
    {%- else %}
        {%- for part in m.content %}{{ part.text | trim }}{% endfor %}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{{ tool | tojson }}{{ ', ' if not loop.last }}{% endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' ~ m.content ~ '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
            {{- ', ' if not loop.last else ']' ~ eos_token }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ m.content ~ ', "call_id": "' ~ m.tool_call_id ~ '"}[/TOOL_RESULTS]' }}
    {%- elif m.role == 'assistant' %}
        {{- ' ' ~ m.content ~ eos_token }}
    {%- elif m.role == 'system' %}
        {{- '[INST] ' ~ m.content ~ '\\n\\n[/INST]' }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('There is no system role here') }}{% endif %}
{%- for m in messages %}
    {%- set who = 'model' if m.role == 'assistant' else m.role %}
    {{- '<start_of_turn>' + who + '\\n' + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

GEMMA_FOLDED = """\
{{ bos_token }}
{%- set rules = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- for m in (messages[1:] if rules else messages) %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- (rules if loop.first) ~ m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

PHI = """\
{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' }}{% endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}"""

ZEPHYR = """\
{% for message in messages %}
{% if message.role == 'user' %}
{{ '<|user|>\n' + message.content + eos_token }}
{% elif message.role == 'system' %}
{{ '<|system|>\n' + message.content + eos_token }}
{% else %}
{{ '<|assistant|>\n'  + message.content + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\\n</tools>\\nCall one with <tool_call>{...}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
        {%- continue %}
    {%- endif %}
    {%- set text = m.content or '' %}
    {%- if m.role == 'assistant' and '</think>' in text %}
        {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.reasoning_content and loop.last %}{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
    {{- text }}
    {%- for call in m.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

DEEPSEEK = """\
{% set ns = namespace(rules='') %}
{%- for m in messages if m['role'] == 'system' %}{% set ns.rules = ns.rules + m['content'] %}{% endfor %}
{{- bos_token ~ ns.rules }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}
    {%- elif m['role'] == 'assistant' and m['content'] %}
        {%- set reply = m['content'] %}
        {%- if '</think>' in reply %}{% set reply = reply.split('</think>') | last %}{% endif %}
        {{- '<｜Assistant｜>' + reply + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}
"""

COMMAND_R = """\
{{ bos_token }}
{%- macro turn(who, text) %}{{ '<|START_OF_TURN_TOKEN|>' + who + text + '<|END_OF_TURN_TOKEN|>' }}{% endmacro %}
{%- set names = {'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>', 'system': '<|SYSTEM_TOKEN|>'} %}
{%- for m in messages %}
    {%- if m.role not in names %}{{ raise_exception('unknown role ' ~ m.role) }}{% endif %}
    {{- turn(names[m.role], m.content) }}
{%- endfor %}
{%- if documents %}
    {%- for d in documents %}
        {{- turn('<|SYSTEM_TOKEN|>', 'Document: ' ~ loop.index0 ~ '\\n' ~ d.title ~ '\\n' ~ d.text) }}
    {%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}
"""

STYLES = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "gemma-folded": GEMMA_FOLDED,
    "phi": PHI,
    "zephyr": ZEPHYR,
    "qwen": QWEN,
    "deepseek": DEEPSEEK,
    "command-r": COMMAND_R,
}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter & <Temperatur> für 'heute'",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "noop", "parameters": {}}},
]
DOCUMENTS = [{"title": "Tides", "text": "Twice a day."}, {"title": "Moon", "text": "Once a month."}]


def _turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {
    "id": "abc123456",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Köln", "days": 2}},
}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [_turn("user", "Hello! Café déjà vu — 123 😊")],
    "spaces": [_turn("user", "  two  spaces\n\n around \n")],
    "turns": [
        _turn("user", "Why is the sky blue?"),
        _turn("assistant", "<think>\nhm\n</think>\n\nScattering; a < b and c > d."),
        _turn("user", "And at night?"),
    ],
    "system": [_turn("system", "Answer in rhyme."), _turn("user", "What is 2+2?")],
    "tools": [
        _turn("system", "Use tools."),
        _turn("user", "Weather in Köln?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        _turn("tool", '{"sky": "grey"}', tool_call_id="abc123456", name="weather"),
        _turn("assistant", "It is grey."),
        _turn("user", "Thanks <b>a lot</b>"),
    ],
    "reasoning": [_turn("user", "Think."), _turn("assistant", "Done.", reasoning="step by step")],
    "open": [_turn("user", "Count."), _turn("assistant", "One, two,")],
    "open-space": [_turn("user", "Count."), _turn("assistant", "One, two, \n")],
}
