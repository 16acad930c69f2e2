"""A worker without a model: it answers every byte with its process id and its threads, and ends with its socket."""

import os
import socket
import sys

from tk.core.process import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        while connection.recv(1):
            connection.sendall(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}".encode())
    sys.exit(7)
