"""The names that a log may have."""

import pytest

from tk.infer.serve.known_names import known_name


@pytest.mark.parametrize(
    "name",
    [
        *(
            "Generate",
            "ModelStreamInfer",
            "Reload",
            "sampling.top_p",
            "stopping.stop",
            "cache.salt",
            "chat.messages[12]",
        ),
        *(
            "messages[3].content[0].type",
            "response_format.json_schema.schema",
            "max_completion_tokens",
            "stream_options",
        ),
        *("parameters.temperature", "inputs[0].contents.bytes_contents", "raw_input_contents", "outputs[1].name", "id"),
    ],
)
def test_names_of_the_wire_and_of_openai_are_shown(name: str) -> None:
    assert known_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "secret", "sampling.secret", "parameters.secret", "messages[secret].role", "top_p secret", "n.secret"]
)
def test_names_that_a_caller_made_up_are_not(name: str) -> None:
    assert known_name(name) == ""
