"""Chat templates that do what published ones do: drop reasoning, trim, print arguments anew, know tools or not."""

from __future__ import annotations

from typing import Final

from tests.support.tiny_model import CHAT_TEMPLATE

TURNS_ONLY: Final = CHAT_TEMPLATE
"""Knows neither tools nor reasoning."""

_HEAD: Final = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
_CALLS: Final = (
    "{% for tool_call in m.tool_calls %}{% set tool_call = tool_call.function %}"
    '\n<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)

TAGGED: Final = (
    _HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ (m.content or '') | trim }}" + _CALLS + "<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Shows tools, writes calls between tags, trims contents."""

THINKING: Final = (
    _HEAD + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set content = (m.content or '') %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ content | trim }}" + _CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As `TAGGED`, of a model that reasons: its history has no reasoning, and a switch leaves it out of the answer."""

ALTERNATING: Final = (
    "{% set ns = namespace(count=0) %}"
    "{% for m in messages %}{% if m.role not in ['tool', 'system'] and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.count = ns.count + 1 %}{% endif %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% set out = call.function | tojson %}{{ out[:-1] }}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    ', "id": "{{ call.id }}"}{{ ", " if not loop.last else "]<|im_end|>" }}{% endfor %}'
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}<|im_end|>{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
    "{% endfor %}"
)
"""Wants user and assistant to take turns, calls not counted; prints calls as a list, cut open; ids have 9 letters."""
