"""The manifest's record of an adapter: its configuration, and the base that it was trained on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from ...core.dtypes import COMPUTE_NAMES
from ...core.errors import ManifestError
from . import json_strict as strict

KEYS: Final = ("base", "adapter")  # of the manifest, since version 3: both or none
CODES: Final = ("int8", "int4")
WEIGHT_DTYPES: Final = (*COMPUTE_NAMES, *CODES)
_BASE_KEYS: Final = ("identity", "path", "weight_dtype")


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """The base of an adapter.

    Attributes:
        identity: the SHA-256 of its logical tensors, which does not depend on a layout; "" if it is not known.
        path: the folder that it was in; "" if it is not known.
        weight_dtype: the numbers of its weights in training, one of WEIGHT_DTYPES; "" if they are not known.
    """

    identity: str
    path: str
    weight_dtype: str


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """An adapter.

    Attributes:
        config: the keys of PEFT's adapter_config.json that decide its tensors and product.
        base: the model that it was trained on.
    """

    config: Mapping[str, Any]
    base: BaseRecord

    def to_json(self) -> dict[str, Any]:
        """Returns the keys of the manifest."""
        return {"base": asdict(self.base), "adapter": dict(self.config)}

    @staticmethod
    def from_json(document: Mapping[str, Any], what: str) -> "AdapterRecord | None":
        """Reads the keys of a manifest; None if it has none of them.

        Raises:
            ManifestError: one of the two is missing, or a value is not of its kind.
        """
        if not any(key in document for key in KEYS):
            return None
        found = {key: strict.mapping(document.get(key), f"{what}: {key}") for key in KEYS}
        base = strict.members(found["base"], f"{what}: base", _BASE_KEYS)
        if base["identity"] != "":
            strict.digest(base["identity"], f"{what}: base: identity")
        strict.text(base["path"], f"{what}: base: path", 4096)
        if base["weight_dtype"] not in ("", *WEIGHT_DTYPES):
            raise ManifestError(f"{what}: base: weight_dtype must be one of {', '.join(WEIGHT_DTYPES)}.")
        return AdapterRecord(found["adapter"], BaseRecord(**base))
