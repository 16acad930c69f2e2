"""The `tritonclient` package against a server's gRPC port: python triton_checks.py HOST:PORT MODEL TOKEN

It runs in an environment without tk, and writes one JSON document.
"""

import json
import queue
import sys
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2
from tritonclient.grpc import (
    InferenceServerClient,
    InferInput,
    InferRequestedOutput,
    InferResult,
    model_config_pb2,
    service_pb2,
)
from tritonclient.utils import InferenceServerException

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
LONG = {"max_tokens": 3000, "ignore_eos": True}  # some hundred milliseconds


def text_input(text: str, shape: tuple[int, ...] = (1,)) -> InferInput:
    tensor = InferInput("text_input", list(shape), "BYTES")
    tensor.set_data_from_numpy(np.full(shape, text, dtype=object))
    return tensor


def shown(result: InferResult) -> dict[str, Any]:
    answer = result.get_response()
    found = {name: [each.decode() for each in result.as_numpy(name)] for name in ("text_output", "finish_reason")}
    return found | {"id": answer.id, "model": answer.model_name, "version": answer.model_version}


def refusal(call: Any, *arguments: Any, **options: Any) -> tuple[str, str]:
    """Returns the status and the message of the error that a call ends in."""
    try:
        call(*arguments, **options)
    except InferenceServerException as error:
        return str(error.status()), str(error.message())
    raise SystemExit("nothing was refused")


def stream(client: InferenceServerClient, model: str, headers: dict[str, str]) -> dict[str, Any]:
    """Returns the texts that streams of one request gave, the most messages of one, and the error of a wrong request.

    A server joins the parts that a busy machine has not sent yet, so that one stream may be a single message. What
    holds an answer back until its end never sends more: streams are tried until one comes in parts, at most 20.
    """
    answers: queue.Queue[tuple[InferResult | None, InferenceServerException | None]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)), headers=headers)

    def parts() -> list[str]:
        client.async_stream_infer(
            model, [text_input("def main(")], request_id="s1", parameters=GREEDY, enable_empty_final_response=True
        )
        texts, is_last = [], False
        while not is_last:
            result, error = answers.get(timeout=60)
            assert result is not None, error
            texts.append(result.as_numpy("text_output")[0].decode())
            is_last = result.get_response().parameters["triton_final_response"].bool_param
        return texts

    streams = [parts()]
    while len(streams[-1]) <= 2 and len(streams) < 20:
        streams.append(parts())
    client.async_stream_infer(model, [text_input("a")], parameters={"top_p": 2.0})
    _, error = answers.get(timeout=60)
    client.stop_stream()
    texts = sorted({"".join(each) for each in streams})
    return {"texts": texts, "messages": len(streams[-1]), "error": error.message() if error else ""}


def cancelled(client: InferenceServerClient, model: str, headers: dict[str, str]) -> str:
    """Returns the status of a call that its caller cancels."""
    errors: queue.Queue[InferenceServerException | None] = queue.Queue()
    call = client.async_infer(
        model, [text_input("a")], lambda result, error: errors.put(error), parameters=LONG, headers=headers
    )
    call.cancel()
    error = errors.get(timeout=60)
    return "" if error is None else str(error.status())


def fields(messages: Any, path: str = "") -> list[str]:
    """Returns the fields of tritonclient's own statement of the protocol, as tests/proto/open_inference has them."""
    found, kinds = [], descriptor_pb2.FieldDescriptorProto
    for message in messages:
        for field in message.field:
            label = "repeated " * (field.label == kinds.LABEL_REPEATED)
            kind = field.type_name or kinds.Type.Name(field.type).removeprefix("TYPE_").lower()
            found.append(f"{path}{message.name}.{field.name} = {field.number}: {label}{kind}")
        found += fields(message.nested_type, f"{path}{message.name}.")
    return found


def main(target: str, model: str, token: str) -> None:
    client, headers = InferenceServerClient(target), {"authorization": f"Bearer {token}"}
    schema, configs = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(schema)
    model_config_pb2.DESCRIPTOR.CopyToProto(configs)

    def infer(tensor: InferInput, name: str = model, **options: Any) -> InferResult:
        return client.infer(name, [tensor], headers=headers, **options)

    numbers = InferInput("text_input", [1], "FP32")
    numbers.set_data_from_numpy(np.zeros(1, dtype=np.float32))
    other = InferInput("prompt", [1], "BYTES")
    other.set_data_from_numpy(np.array(["a"], dtype=object))
    output = [InferRequestedOutput("logits")]
    batched = infer(text_input("def main(", (1, 1)), request_id="mine", parameters=GREEDY).as_numpy("text_output")
    metadata = client.get_model_metadata(model, headers=headers, as_json=True)
    found = {
        "fields": fields(schema.message_type) + fields(configs.message_type),
        "health": [
            client.is_server_live(headers=headers),
            client.is_server_ready(headers=headers),
            client.is_model_ready(model, headers=headers),
        ],
        "server": client.get_server_metadata(headers=headers).name,
        "model": [metadata["name"], metadata["versions"], metadata["inputs"], metadata["outputs"]],
        "config": client.get_model_config(model, headers=headers, as_json=True)["config"],
        "batched": [list(batched.shape), batched[0][0].decode()],
        "answer": shown(infer(text_input("def main("), request_id="mine", parameters=GREEDY)),
        "unnamed": shown(infer(text_input("def main("), name="", parameters=GREEDY | {"n": 2, "stop": '["q"]'})),
        "stream": stream(client, model, headers),
        "cancelled": cancelled(client, model, headers),
        "refused": {
            "tensor": refusal(infer, other),
            "datatype": refusal(infer, numbers),
            "shape": refusal(infer, text_input("a", (1, 2))),
            "output": refusal(infer, text_input("a"), outputs=output),
            "parameter": refusal(infer, text_input("a"), parameters={"beam_width": 4}),
            "value": refusal(infer, text_input("a"), parameters={"temperature": -1.0}),
            "priority": refusal(infer, text_input("a"), priority=1),
            "model": refusal(infer, text_input("a"), name="another"),
            "version": refusal(infer, text_input("a"), model_version="77"),
            "late": refusal(infer, text_input("a"), parameters=LONG, client_timeout=0.05),
            "late by a parameter": refusal(infer, text_input("a"), parameters=LONG, timeout=20_000),
            "no token": refusal(client.infer, model, [text_input("a")]),
            "another extension": refusal(client.get_log_settings, headers=headers),
        },
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
