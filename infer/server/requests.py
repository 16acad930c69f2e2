"""The checks of a request's message, before the engine receives the request."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from ...core.errors import InvalidRequest, PromptTooLong
from ...proto.v1 import generation_pb2 as pb
from ..requests.events import ModelInfo
from .errors import RoleMissing, UnknownModel
from .tokens import ADMIN, Caller


def check_request(request: pb.GenerateRequest, info: ModelInfo, caller: Caller) -> None:
    """Checks a request's model, priority and prompt.

    Raises:
        InvalidRequest: the prompt is missing.
        UnknownModel: the request is for another model.
        RoleMissing: the priority needs another role.
    """
    if request.model and request.model != info.name:
        raise UnknownModel(f"Model {request.model!r} is not served here; leave it empty or ask for {info.name!r}.")
    if request.priority > 0 and ADMIN not in caller.roles:
        raise RoleMissing(f"priority is {request.priority}; above 0 it needs the role admin. Use 0 or less.")
    if request.WhichOneof("prompt") is None:
        raise InvalidRequest("The request has no prompt; set text, tokens or chat.", field="prompt")


def check_text(text: str, longest_token_bytes: int, info: ModelInfo) -> None:
    """Checks that a text may have few enough tokens, before the effort of finding them.

    Raises:
        PromptTooLong: the text has more tokens than the model's length, however it is tokenized.
    """
    size, longest = len(text.encode()), info.max_model_len * longest_token_bytes
    if size > longest:
        raise PromptTooLong(
            f"The text has {size} bytes, more than {info.max_model_len} tokens of at most {longest_token_bytes} bytes "
            f"can hold. Shorten it to at most {longest} bytes.",
            field="text",
        )


def refuse_unknown_fields(message: Message, path: str = "") -> None:
    """Refuses a message with an unknown field at any depth.

    protobuf keeps a map entry that has unknown fields as an unknown field of the message that contains the map.

    Raises:
        InvalidRequest: a field is unknown; the message names its path and number.
    """
    for unknown in UnknownFieldSet(message):
        field = message.DESCRIPTOR.fields_by_number.get(unknown.field_number)
        name = f"{path}{unknown.field_number}" if field is None else f"{path}{field.name}"
        raise InvalidRequest(
            f"{message.DESCRIPTOR.full_name} holds field number {unknown.field_number} ({name}) in a way unknown to "
            "this server, which may be older than the client; leave it unset.",
            field=name,
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        if isinstance(value, Message):
            refuse_unknown_fields(value, f"{path}{field.name}.")
        else:
            for index, item in enumerate(value):
                refuse_unknown_fields(item, f"{path}{field.name}[{index}].")
