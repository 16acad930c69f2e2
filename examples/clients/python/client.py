"""A client of `tk serve` for any Python with grpcio alone: no tk, no torch.

    pip install grpcio grpcio-tools grpcio-status googleapis-common-protos
    python -m grpc_tools.protoc -I .. --python_out=. --grpc_python_out=. generation.proto
    python client.py HOST:PORT 'def main('

TK_TOKEN is the caller's token, TK_CA the PEM file of the server's authority; without TK_CA nothing is encrypted.
With tk installed, `tk.infer.Client` is shorter and retries by itself.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import generation_pb2 as pb
import generation_pb2_grpc as pb_grpc
import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


def connect(target: str) -> grpc.Channel:
    """Returns a channel to HOST:PORT, encrypted if TK_CA names the authority."""
    if "TK_CA" not in os.environ:
        return grpc.insecure_channel(target)
    return grpc.secure_channel(target, grpc.ssl_channel_credentials(Path(os.environ["TK_CA"]).read_bytes()))


def stream(channel: grpc.Channel, request: pb.GenerateRequest, seconds: float) -> Iterator[str]:
    """Yields the text as it is made; leaving the loop early ends the request on the server."""
    token = os.environ.get("TK_TOKEN")
    metadata = [("authorization", f"Bearer {token}")] if token else []
    call = pb_grpc.GenerationStub(channel).Generate(request, timeout=seconds, metadata=metadata)
    try:
        for event in call:
            yield event.delta.text
    finally:
        call.cancel()


def advice(error: grpc.RpcError) -> str:
    """Returns the details of a failed call: the wrong fields, and when to try again."""
    words = []
    for detail in getattr(rpc_status.from_call(error), "details", ()):
        wrong, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(wrong):
            words += [f"Field {each.field}." for each in wrong.field_violations]
        if detail.Unpack(retry):
            words.append(f"Try again in {retry.retry_delay.ToTimedelta().total_seconds():g} s.")
    return " ".join(words)


def main(target: str, prompt: str) -> int:
    """Streams the answer to stdout; the exit code is 1 if the call fails."""
    with connect(target) as channel:
        try:
            for text in stream(channel, pb.GenerateRequest(text=prompt, stopping={"max_new_tokens": 64}), 60.0):
                print(text, end="", flush=True)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()} {advice(error)}", file=sys.stderr)
            return 1
    print()
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("Give the address of a server and a prompt: python client.py HOST:PORT 'def main('")
    sys.exit(main(*sys.argv[1:]))
