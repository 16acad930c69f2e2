"""Fields of a JSON object, each taken with its type; those that are left are refused by name."""

import pytest

from tk.core.errors import InvalidRequest
from tk.infer.serve.openai.fields import Fields


def test_fields_are_taken_once_and_null_is_unset() -> None:
    fields = Fields({"text": "a", "number": 1, "nothing": None, "ids": [1, 2]})
    assert (fields.text("text"), fields.text("text")) == ("a", None)
    assert fields.number("number") == 1.0
    assert fields.integers("ids") == [1, 2]
    assert fields.texts("nothing") == []
    fields.refuse_rest()


def test_what_is_left_is_refused_by_its_path() -> None:
    inner = Fields({"outer": {"left": 1}}).object("outer")
    assert inner is not None
    with pytest.raises(InvalidRequest, match=r"outer\.left is unknown") as caught:
        inner.refuse_rest()
    assert caught.value.field == "outer.left"
    with pytest.raises(InvalidRequest, match="tools is not built"):
        Fields({"tools": []}).refuse_rest(frozenset({"tools"}))
