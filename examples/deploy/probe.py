"""Asks a server for its health, for Docker and systemd: python probe.py HOST:PORT [--tls-ca FILE] [--service NAME]

The exit code is 0 if the service is SERVING. Health answers without a token. An address in the certificate may differ
from the one that is asked, as on the loopback interface: --tls-name says which name the certificate has.
"""

import argparse
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--tls-ca", type=Path)
    parser.add_argument("--tls-name", default="localhost")
    parser.add_argument("--service", default="", help="'' is liveness, 'tk.v1.Generation' readiness")
    options = parser.parse_args()
    if options.tls_ca is None:
        channel = grpc.insecure_channel(options.target)
    else:
        credentials = grpc.ssl_channel_credentials(options.tls_ca.read_bytes())
        name = ("grpc.ssl_target_name_override", options.tls_name)
        channel = grpc.secure_channel(options.target, credentials, options=[name])
    with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=options.service), timeout=2)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0 if answer.status == SERVING else 1


if __name__ == "__main__":
    sys.exit(main())
