"""Random JSON schemas whose documents are short: strings, arrays, numbers and properties are bounded."""

import json
import random
from typing import Any

import jsonschema_rs

WORDS = ("id", "name", "tags", "état", "x y", 'a"b', "size", "kind")


def random_schema(seed: int, depth: int = 3) -> dict[str, Any]:
    """Returns the schema of that number, always the same; objects and arrays are nested at most `depth` deep."""
    return _schema(random.Random(seed), depth)


def is_accepted(document: str, schema: dict[str, Any]) -> bool:
    """Returns whether a text is JSON that a schema accepts, as a validator sees it that is not ours."""
    try:
        return bool(jsonschema_rs.validator_for(schema).is_valid(json.loads(document)))
    except json.JSONDecodeError:
        return False


def _schema(chance: random.Random, depth: int) -> dict[str, Any]:
    simple = (_string, _string, _integer, _enum, _constant, _plain)
    made = chance.choice(simple) if not depth else chance.choice((_object, _object, _array, _either, *simple))
    return made(chance, depth)


def _string(chance: random.Random, _: int) -> dict[str, Any]:
    if chance.random() < 0.3:
        return {"type": "string", "pattern": chance.choice(["^[a-z]{1,6}$", "^[A-Z]{2}-[0-9]{1,4}$", "^(yes|no)$"])}
    least = chance.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chance.randint(0, 6)}


def _integer(chance: random.Random, _: int) -> dict[str, Any]:
    least = chance.randint(-200, 200)
    return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 5000)}


def _enum(chance: random.Random, _: int) -> dict[str, Any]:
    return {"enum": chance.sample(["red", "größer", 1, -2.5, True, None, [], {"a": 1}], chance.randint(1, 4))}


def _constant(chance: random.Random, _: int) -> dict[str, Any]:
    return {"const": chance.choice(["so", 17, False, None, [1, "two"]])}


def _plain(chance: random.Random, _: int) -> dict[str, Any]:
    return {"type": chance.choice(["boolean", "null"])}


def _either(chance: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(chance, depth - 1) for _ in range(2)]}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    least = chance.randint(0, 2)
    items = _schema(chance, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + chance.randint(0, 1)}


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(WORDS, chance.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _schema(chance, depth - 1) for name in names},
        "required": chance.sample(names, chance.randint(0, len(names))),
        "additionalProperties": False,
    }
