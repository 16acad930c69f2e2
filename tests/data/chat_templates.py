"""Chat templates in the style of published models, and a tokenizer's folder with one.

MARK and DONE stand around the assistant's turns: `marked` makes generation blocks of them, `unmarked` removes them, and
`skipping` makes blocks that leave out messages with a true `skip`, for `transformers` the same as weight 0.
"""

import re
import shutil
from pathlib import Path
from types import MappingProxyType

_TOOLS = "{% if tools %}{{ '<|start|>tools\\n' }}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
_CALLS = (
    "{% if m.tool_calls %}{% for call in m.tool_calls %}"
    "{{ '<call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</call>' }}"
    "{% endfor %}{% endif %}"
)
TEMPLATES = MappingProxyType(
    {
        "ChatML with tools": _TOOLS
        + "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant\\n' }}MARK"
        "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
        "{{ m.content or '' }}" + _CALLS + "{{ '<|end|>' }}DONE{{ '\\n' }}"
        "{% else %}{{ '<|start|>' + m.role + (' ' + m.name if m.name else '') + '\\n' + m.content + '<|end|>\\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}",
        "Llama 3": "{{ bos_token }}{% if tools is not none and tools %}{{ '<|start|>ipython\\n' }}"
        "{% for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}{{ '<|end|>' }}{% endif %}"
        "{% for m in messages %}{{ '<|start|>' + m['role'] + '\\n\\n' }}"
        "{% if m['role'] == 'assistant' %}MARK{% if m.tool_calls %}"
        '{{ \'{"name": "\' + m.tool_calls[0].function.name + \'", "parameters": \' }}'
        "{{ m.tool_calls[0].function.arguments | tojson }}{{ '}' }}"
        "{% else %}{{ m['content'] | trim }}{% endif %}{{ '<|end|>' }}DONE"
        "{% else %}{{ m['content'] | trim + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant\\n\\n' }}{% endif %}",
        "SmolLM2": "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|start|>system\\nYou are helpful<|end|>\\n' }}{% endif %}"
        "{% if message['role'] == 'assistant' %}{{ '<|start|>assistant\\n' }}"
        "MARK{{ message['content'] + '<|end|>' }}DONE"
        "{{ '\\n' }}{% else %}"
        "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}",
        "everything as JSON": "{{ documents | tojson }}{{ style | default('plain') }}"
        + _TOOLS
        + "{% for m in messages %}{% if m.role == 'assistant' %}A:MARK{{ m | tojson }}\nDONE"
        "{% else %}{{ m.role }}:{{ m | tojson }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
    }
)


def marked(source: str) -> str:
    """Returns a template with generation blocks."""
    return source.replace("MARK", "{% generation %}").replace("DONE", "{% endgeneration %}")


def unmarked(source: str) -> str:
    """Returns a template without generation blocks."""
    return source.replace("MARK", "").replace("DONE", "")


def skipping(source: str) -> str:
    """Returns a template with generation blocks for messages without a true `skip` only."""
    name = "message" if "{% for message" in source else "m"
    split = rf"{{% if {name}.skip %}}\1{{% else %}}{{% generation %}}\1{{% endgeneration %}}{{% endif %}}"
    return re.sub("MARK(.*?)DONE", split, source, flags=re.DOTALL)


def with_template(folder: Path, source: str, out: Path) -> Path:
    """Copies a tokenizer's folder to `out`, with a chat template, and returns `out`."""
    shutil.copytree(folder, out)
    (out / "chat_template.jinja").write_text(source)
    return out
