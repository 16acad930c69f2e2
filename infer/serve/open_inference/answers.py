"""The answers: the metadata of the model's tensors, and the tensors of a continuation, whole or piece by piece."""

from collections.abc import Mapping, Sequence
from typing import Final

from ....proto.open_inference import open_inference_pb2 as oip
from ...engine.request.completion import Completion, CompletionBuilder
from ...engine.request.events import Delta, Finished, FinishReason, ModelInfo, SentEvent, Started
from .inference import BYTES, FINISH_REASON, OUTPUTS, SIZE, TEXT_INPUT, TEXT_OUTPUT, Inference, check_version

PLATFORM: Final = "tk_safetensors"
# The name under which clients of streams look for it.
IS_LAST: Final = "triton_final_response"


def metadata_of(info: ModelInfo) -> oip.ModelMetadataResponse:
    """Returns the description of the model and its tensors."""
    tensor = oip.ModelMetadataResponse.TensorMetadata
    return oip.ModelMetadataResponse(
        name=info.name,
        versions=[str(info.step)],
        platform=PLATFORM,
        inputs=[tensor(name=TEXT_INPUT, datatype=BYTES, shape=[1])],
        outputs=[tensor(name=name, datatype=BYTES, shape=[-1]) for name in OUTPUTS],
    )


def config_of(info: ModelInfo) -> oip.ModelConfigResponse:
    """Returns the description of the model in the form of a server's configuration."""
    outputs = [oip.ModelOutput(name=name, data_type=oip.TYPE_STRING, dims=[-1]) for name in OUTPUTS]
    config = oip.ModelConfig(
        name=info.name,
        platform=PLATFORM,
        backend="tk",
        input=[oip.ModelInput(name=TEXT_INPUT, data_type=oip.TYPE_STRING, dims=[1])],
        output=outputs,
        model_transaction_policy=oip.ModelTransactionPolicy(decoupled=True),
    )
    return oip.ModelConfigResponse(config=config)


def whole_answer(inference: Inference, completion: Completion, model: str) -> oip.ModelInferResponse:
    """Returns the answer to a request; `model` is the model's name.

    Raises:
        UnknownModel: the weights were changed between the request and its start, and it asked for a version.
    """
    check_version(inference.version, completion.step)
    values = {
        TEXT_OUTPUT: [choice.text for choice in completion.choices],
        FINISH_REASON: [_reason(choice.finish_reason) for choice in completion.choices],
    }
    answer = _answer(inference, values)
    answer.model_name, answer.model_version, answer.id = model, str(completion.step), completion.request_id
    _add_totals(answer, completion)
    return answer


class StreamedAnswer:
    """The pieces of an answer: their tensors, joined element by element, are those of the whole answer.

    Args:
        inference: the request.
        model: the model's name.
    """

    def __init__(self, inference: Inference, model: str) -> None:
        self._inference, self._model = inference, model
        self._num_samples = self._left = inference.request.params.n
        self._builder = CompletionBuilder()
        self._id, self._step = "", 0

    def piece(self, event: SentEvent) -> oip.ModelInferResponse | None:
        """Returns the message of an event; None if there is nothing to send.

        Raises:
            UnknownModel: see `whole_answer`.
        """
        self._builder.add(event)
        values = {name: [""] * self._num_samples for name in OUTPUTS}
        match event:
            case Started():
                check_version(self._inference.version, event.step)
                self._id, self._step = event.request_id, event.step
                return None
            case Delta() if event.text:
                values[TEXT_OUTPUT][event.index] = event.text
            case Finished():
                values[FINISH_REASON][event.index] = _reason(event.reason)
                self._left -= 1
            case _:
                return None
        piece = _answer(self._inference, values)
        piece.model_name, piece.model_version, piece.id = self._model, str(self._step), self._id
        piece.parameters[IS_LAST].bool_param = not self._left
        if not self._left:
            _add_totals(piece, self._builder.completion())
        return piece


def _answer(inference: Inference, values: Mapping[str, Sequence[str]]) -> oip.ModelInferResponse:
    """Returns an answer with the tensors that the caller asked for, in the form in which its own was."""
    answer = oip.ModelInferResponse()
    for name in inference.outputs:
        elements = [text.encode() for text in values[name]]
        tensor = answer.outputs.add(name=name, datatype=BYTES, shape=[*inference.batch, len(elements)])
        if inference.is_raw:
            answer.raw_output_contents.append(b"".join(SIZE.pack(len(each)) + each for each in elements))
        else:
            tensor.contents.bytes_contents.extend(elements)
    return answer


def _add_totals(answer: oip.ModelInferResponse, completion: Completion) -> None:
    answer.parameters["seed"].uint64_param = completion.seed
    if completion.adapter_sha256:
        answer.parameters["adapter_sha256"].string_param = completion.adapter_sha256
    for name in ("prompt_tokens", "cached_tokens", "completion_tokens"):
        answer.parameters[name].int64_param = getattr(completion.usage, name)


def _reason(reason: FinishReason) -> str:
    """Returns the name that other servers have for a reason to finish."""
    return "length" if reason is FinishReason.LENGTH else "stop"
