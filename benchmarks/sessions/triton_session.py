"""What the `tritonclient` package asks: python triton_session.py HOST:PORT. It runs in an environment without tk."""

import queue
import sys
from contextlib import suppress
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

GREEDY = {"temperature": 0.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
SEEDED = {"seed": 7, "n": 2, "max_tokens": 8, "stop": '["q"]', "top_k": 40}
WRONG: list[dict[str, Any]] = [
    *(
        {"temperature": -1.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"n": 17},
        {"seed": -1},
        {"max_tokens": 0},
        {"min_tokens": 9999},
    ),
    *({"stop": "["}, {"stop": '[""]'}, {"stop_token_ids": "[99999]"}, {"logit_bias": '{"99999": 1}'}, {"regex": "("}),
    *({"json_schema": "{"}, {"max_tokens": 100000}, {"max_new_tokens": 1, "max_tokens": 2}, {"ignore_eos": 3}),
]


def text_input(text: str, shape: tuple[int, ...] = (1,)) -> InferInput:
    tensor = InferInput("text_input", list(shape), "BYTES")
    tensor.set_data_from_numpy(np.full(shape, text, dtype=object))
    return tensor


def stream(client: InferenceServerClient) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for parameters in (GREEDY, SEEDED, {"top_p": 2.0}):
        options = {"request_id": "s", "parameters": parameters, "enable_empty_final_response": True}
        client.async_stream_infer("", [text_input("def main(")], **options)
        is_last = False
        while not is_last:
            result, error = answers.get(timeout=60)
            is_last = error or result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()


def main(target: str) -> None:
    client = InferenceServerClient(target)
    client.is_server_live()
    client.is_server_ready()
    client.get_server_metadata()
    model = client.get_model_metadata("").name
    client.is_model_ready(model)
    client.infer(model, [text_input("def main(")], request_id="mine", parameters=GREEDY)
    client.infer("", [text_input("def main(")], parameters=SEEDED)
    stream(client)
    numbers = InferInput("text_input", [1], "FP32")
    numbers.set_data_from_numpy(np.zeros(1, dtype=np.float32))
    wrong: list[tuple[InferInput, dict[str, Any]]] = [
        (numbers, {}),
        (text_input("a", (1, 1)), {}),
        (text_input("a"), {"outputs": [InferRequestedOutput("logits")]}),
        (text_input("a"), {"parameters": {"beam_width": 4}}),
        *((text_input("a"), {"parameters": {"seed": 1} | each}) for each in WRONG),
        (text_input("a"), {"priority": 1}),
        (text_input("a"), {"model_version": "77"}),
    ]
    for tensor, options in wrong:
        with suppress(InferenceServerException):  # it is in the record
            client.infer(model, [tensor], **options)
    with suppress(InferenceServerException):
        client.get_model_config(model)


if __name__ == "__main__":
    main(sys.argv[1])
