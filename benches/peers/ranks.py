"""Starts a peer in N processes on this machine: `python ranks.py N SCRIPT ARGUMENTS...`.

It replaces torchrun, which needs the memory of another process with PyTorch. Only rank 0 writes to standard output. If
a rank fails, the other ranks are killed. The caller sets `OMP_NUM_THREADS`, the number of threads of a rank.
"""

import os
import socket
import subprocess
import sys
import time


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(rank, ranks, port, command):
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    output = None if rank == 0 else subprocess.DEVNULL
    return subprocess.Popen([sys.executable, *command], env=environment, stdout=output)


def main():
    ranks, port = int(sys.argv[1]), free_port()
    processes = [start(rank, ranks, port, sys.argv[2:]) for rank in range(ranks)]
    while True:
        codes = [process.poll() for process in processes]
        failed = next((code for code in codes if code), 0)
        if failed or all(code == 0 for code in codes):
            break
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
