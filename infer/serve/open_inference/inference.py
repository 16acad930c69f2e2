"""The message ModelInferRequest as a request to the engine: its tensor is the prompt, its parameters the options."""

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from ....core.errors import InvalidRequest
from ....proto.open_inference import open_inference_pb2 as oip
from ...engine.request.request import Request
from ...engine.request.sampling_params import OPTIONS
from ..errors import UnknownModel
from .parameters import read_adapter, read_parameters, read_timeout, unknown_parameter, wrong

TEXT_INPUT: Final = "text_input"
TEXT_OUTPUT: Final = "text_output"
FINISH_REASON: Final = "finish_reason"
OUTPUTS: Final = (TEXT_OUTPUT, FINISH_REASON)
BYTES: Final = "BYTES"
# The size before each element of raw contents: 4 bytes, lowest first.
SIZE: Final = struct.Struct("<I")


@dataclass(frozen=True)
class Inference:
    """A request as read.

    Attributes:
        request: the request, without the deadline and form of its answer.
        version: the training step, in digits, that the weights must have; "" = any.
        outputs: the names of the answer's tensors.
        batch: the dimensions before that of the text, which the answer's tensors have too: none, or a 1.
        is_raw: whether contents are raw, those of the answer too.
        timeout: the seconds that the caller waits, or None.
        names: the names of the parameters by the names of the options.
    """

    request: Request
    version: str
    outputs: tuple[str, ...]
    batch: tuple[int, ...]
    is_raw: bool
    timeout: float | None
    names: Mapping[str, str]


def read_inference(message: oip.ModelInferRequest) -> Inference:
    """Reads a message.

    Raises:
        InvalidRequest: a tensor or a parameter is wrong or unknown.
    """
    prompt = _text(message)
    params, names = read_parameters(message.parameters)
    return Inference(
        Request(
            prompt,
            params,
            model=message.model_name,
            request_id=message.id,
            adapter=read_adapter(message.parameters),
        ),
        message.model_version,
        _outputs(message),
        tuple(message.inputs[0].shape[:-1]),
        is_raw=bool(message.raw_input_contents),
        timeout=read_timeout(message.parameters),
        names=names,
    )


def check_version(version: str, step: int) -> None:
    """Checks that weights are those that were asked for.

    Args:
        version: the training step in digits; "" = any.
        step: the training step of the weights.

    Raises:
        UnknownModel: they are others.
    """
    if version not in ("", str(step)):
        raise UnknownModel(
            f"Version {version[:100]!r} of the model is not served here; leave it empty or ask for '{step}', the "
            "training step of the weights."
        )


@contextmanager
def named_as_given(names: Mapping[str, str]) -> Iterator[None]:
    """Lets the errors of the body name a field as the caller did.

    Args:
        names: the names of the parameters by the names of the options.
    """
    try:
        yield
    except InvalidRequest as error:
        field = {"text": "inputs[0]", "prompt": "inputs[0]", "request_id": "id"}.get(error.field, error.field)
        if error.field in OPTIONS:
            field = f"parameters.{names.get(error.field, error.field)}"
        raise error.renamed(field) from error


def _text(message: oip.ModelInferRequest) -> str:
    """Returns the only element of the only tensor."""
    if len(message.inputs) != 1:
        raise wrong("inputs", f"{len(message.inputs)} tensors", f"one, {TEXT_INPUT}")
    tensor = message.inputs[0]
    if tensor.name != TEXT_INPUT:
        raise wrong("inputs[0].name", repr(tensor.name[:60]), TEXT_INPUT, tensor.name)
    if tensor.datatype != BYTES:
        raise wrong("inputs[0].datatype", repr(tensor.datatype[:60]), BYTES, tensor.datatype)
    if list(tensor.shape) not in ([1], [1, 1]):
        raise wrong("inputs[0].shape", str(list(tensor.shape[:9])), "[1] or [1, 1]: one text in each request")
    for name in tensor.parameters:
        raise unknown_parameter(f"inputs[0].parameters.{name}")
    raw = message.raw_input_contents
    field, element = ("raw_input_contents", _raw_element(tensor, raw)) if raw else ("inputs[0]", _element(tensor))
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise wrong(field, f"no UTF-8 (byte {error.start})", "text in UTF-8") from error


def _element(tensor: oip.ModelInferRequest.InferInputTensor) -> bytes:
    for field in oip.InferTensorContents.DESCRIPTOR.fields:
        count, right = len(getattr(tensor.contents, field.name)), int(field.name == "bytes_contents")
        if count != right:
            shown = f"{count} elements"
            raise wrong(f"inputs[0].contents.{field.name}", shown, f"{right}: contents of BYTES, as of the shape")
    element: bytes = tensor.contents.bytes_contents[0]
    return element


def _raw_element(tensor: oip.ModelInferRequest.InferInputTensor, raw: list[bytes]) -> bytes:
    if tensor.HasField("contents"):
        raise wrong("inputs[0].contents", "set beside raw_input_contents", "unset there")
    if len(raw) != 1:
        raise wrong("raw_input_contents", f"{len(raw)} entries", "one for each tensor, which is one")
    if len(raw[0]) < SIZE.size or len(raw[0]) != SIZE.size + SIZE.unpack_from(raw[0])[0]:
        shown = f"{len(raw[0])} bytes"
        raise wrong(
            "raw_input_contents", shown, "one text with its number of bytes before it, in 4 bytes, lowest first"
        )
    return raw[0][SIZE.size :]


def _outputs(message: oip.ModelInferRequest) -> tuple[str, ...]:
    """Returns the names of the tensors that the answer shall have; all if the caller names none."""
    names: list[str] = []
    for number, output in enumerate(message.outputs):
        if output.name not in OUTPUTS or output.name in names:
            raise wrong(
                f"outputs[{number}].name", repr(output.name[:60]), f"{' or '.join(OUTPUTS)}, each once", output.name
            )
        for name in output.parameters:
            raise unknown_parameter(f"outputs[{number}].parameters.{name}")
        names.append(output.name)
    return tuple(names) or OUTPUTS
