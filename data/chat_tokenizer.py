"""A tokenizer for conversations: a copy of a model's tokenizer, with a plain chat template where the model has none."""

from pathlib import Path
from typing import Final

from ..core.errors import ConfigError
from ..text.template_files import special_tokens
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_files import SIDE_FILES, TEMPLATE_FILE, TOKENIZER_FILE, TextFiles
from .publish import new_folder

# A role and a new line before each message, an empty line after it. The end of text, with which a base model ends its
# documents, ends the assistant's turns. New lines are tokens of their own, so a prompt's tokens are those of training.
PLAIN_TEMPLATE: Final = """\
{% for message in messages %}
{{ message.role + ":\\n" }}
{%- if message.role == "assistant" %}
{%- generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else %}
{{- message.content }}
{%- endif %}
{{- "\\n\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "assistant:\\n" }}
{%- endif %}
"""


def write_chat_tokenizer(model: Path, out: Path) -> None:
    """Makes the folder `out`: the tokenizer of a model's folder, with `PLAIN_TEMPLATE` as its chat template.

    Raises:
        CheckpointError: the tokenizer cannot be read.
        ConfigError: it names no token that ends a text, or `out` exists or cannot be made.
    """
    files = TextFiles.read(model)
    Tokenizer.of(files)
    if "eos_token" not in special_tokens(files):
        raise ConfigError(
            f"The tokenizer in {model} has neither a chat template nor an eos_token in tokenizer_config.json, with "
            f"which answers could end: add {TEMPLATE_FILE} to a copy of its folder, and name that as [data] tokenizer."
        )
    kept = {name: data for name, data in files.contents.items() if name in SIDE_FILES or name == TOKENIZER_FILE}
    with new_folder(out) as folder:
        for name, data in kept.items():
            (folder / name).write_bytes(data)
        (folder / TEMPLATE_FILE).write_text(PLAIN_TEMPLATE, encoding="utf-8")
