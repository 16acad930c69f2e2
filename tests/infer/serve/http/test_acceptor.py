"""Connections of a process without a descriptor left wait; they are neither lost nor a flood of errors."""

import select
import socket
import subprocess
import sys
from itertools import pairwise

WAIT_SECONDS = 30.0
CROWD = 40
PAUSE = 0.05
SERVER = f"""
import asyncio, logging, os, resource, socket, sys, time
from tk.infer.serve.http import listener
listener.PAUSE = {PAUSE}
logging.basicConfig()

async def main():
    def greet(reader, writer):
        writer.write(b"hello")
        async def end():
            await reader.read()
            writer.close()
        asyncio.create_task(end())
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    taken = len(os.listdir("/proc/self/fd"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 8, hard))
    loop = asyncio.get_running_loop()
    accept = loop.sock_accept

    async def observed(listening):
        try:
            return await accept(listening)
        except OSError:
            print(time.monotonic(), flush=True)
            raise

    loop.sock_accept = observed
    server = listener.Acceptor(listening, greet, None, 1.0)
    print(listening.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()
    await asyncio.sleep(0)

asyncio.run(main())
"""


def test_connections_wait_for_a_descriptor() -> None:
    server = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stderr is not None
        place = "127.0.0.1", int(server.stdout.readline())
        crowd = [socket.create_connection(place, WAIT_SECONDS) for _ in range(CROWD)]
        assert "Connections wait: Too many open files" in server.stderr.readline()
        attempts = [float(server.stdout.readline()) for _ in range(4)]
        assert all(later - earlier >= PAUSE for earlier, later in pairwise(attempts))
        poll = select.poll()
        poll.register(server.stderr, select.POLLIN)
        assert not poll.poll(0), "one line for all attempts until one succeeds"
        for connection in crowd:  # the first ones end, and make room for the next ones
            assert connection.recv(5) == b"hello"
            connection.close()
        _, errors = server.communicate(timeout=WAIT_SECONDS)
    finally:
        server.kill()
        server.communicate()
    assert server.returncode == 0, errors
    assert len(errors.splitlines()) < CROWD, errors
    assert "Traceback" not in errors
