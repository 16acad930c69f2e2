"""The record of an adapter in a manifest: it comes back, and a damaged one is refused by name."""

import json
from typing import Any

import pytest

from tk.checkpoint.format.adapter_record import AdapterRecord, BaseRecord
from tk.checkpoint.format.manifest import Manifest, StoredTensor
from tk.core.errors import ManifestError
from tk.core.layout import Layout

RECORD = AdapterRecord({"peft_type": "LORA", "r": 4}, BaseRecord("ab" * 32, "/models/base", "bf16"))
MANIFEST = Manifest(3, Layout(), {"a.lora_A.weight": StoredTensor((4, 8), {"weight": "F32"})}, adapter=RECORD)


def test_a_manifest_with_an_adapter_comes_back_and_older_readers_refuse_it_as_newer() -> None:
    data = MANIFEST.to_bytes()
    assert Manifest.parse(data, "the manifest") == MANIFEST
    assert json.loads(data)["version"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base": None}, "base"),
        ({"adapter": []}, "adapter"),
        ({"base": {"identity": "ab", "path": "", "weight_dtype": "fp32"}}, "base: identity must be a SHA-256"),
        ({"base": {"identity": "ab" * 32, "path": "a\nb", "weight_dtype": "fp32"}}, "base: path must be a printable"),
        (
            {"base": {"identity": "ab" * 32, "path": "", "weight_dtype": "F33"}},
            "weight_dtype must be one of fp32",
        ),
        ({"base": {"identity": "ab" * 32, "path": ""}}, "base lacks 'weight_dtype'"),
        ({"version": 2}, "has an unknown key 'base'"),
    ],
)
def test_a_damaged_record_is_refused(change: dict[str, Any], message: str) -> None:
    document = json.loads(MANIFEST.to_bytes()) | change
    with pytest.raises(ManifestError, match=message):
        Manifest.parse(json.dumps(document).encode(), "the manifest")


def test_half_a_record_is_refused() -> None:
    document = json.loads(MANIFEST.to_bytes())
    del document["adapter"]
    with pytest.raises(ManifestError, match="adapter"):
        Manifest.parse(json.dumps(document).encode(), "the manifest")
