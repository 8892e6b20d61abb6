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
