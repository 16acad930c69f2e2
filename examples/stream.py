"""Streams one prompt from a running server.

Needs a server, as of `tk serve runs/demo/tp1 --port 50051`:

    python stream.py 127.0.0.1:50051 'def main('
"""

import sys

from tk.infer import Client, SamplingParams

if len(sys.argv) != 3:
    sys.exit("Give the address of a server and a prompt: python examples/stream.py HOST:PORT 'def main('")
with Client(sys.argv[1]) as client:
    for delta in client.stream(sys.argv[2], SamplingParams(temperature=0.8, max_new_tokens=100)):
        print(delta.text, end="", flush=True)
print()
