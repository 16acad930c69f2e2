"""Stock gRPC as a prober has it: health, its stream, and reflection. Usage: python probe.py HOST:PORT

It runs in an environment without tk. It writes one JSON document, then one line per change of the readiness.
"""

import json
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


def status(stub: health_pb2_grpc.HealthStub, service: str) -> str:
    """Returns the service's health, or the status code of a refusal."""
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    except grpc.RpcError as error:
        return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def main(target: str) -> None:
    with grpc.insecure_channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        found = {service: status(stub, service) for service in ("", "tk.v1.Generation", "unknown")}
        print(json.dumps({"health": found, "services": sorted(services)}), flush=True)
        for update in stub.Watch(health_pb2.HealthCheckRequest(service="tk.v1.Generation"), timeout=60):
            name = health_pb2.HealthCheckResponse.ServingStatus.Name(update.status)
            print(name, flush=True)
            if name == "NOT_SERVING":
                return


if __name__ == "__main__":
    main(*sys.argv[1:])
