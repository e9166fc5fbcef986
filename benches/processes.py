#!/usr/bin/env python3
"""Time of a step and memory with ranks as threads and as processes, interleaved.

    cargo build --release --bins --features deepburn-cli/mpi
    python3 benches/processes.py --rounds 3

GPT-2 124M in fp32, ZeRO-3, 2 ranks x 2 x 128 tokens. With --peer COMMAND (run through a shell, from the
current folder) a third program takes its turn; it prints a line of JSON with "med", its seconds a step. Memory
is the largest sum of proportional set sizes of all processes that a command started.
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import tempfile
import threading
import time

STEPS = 5
JOB = f"--config gpt2.json --set training.max_steps={STEPS} --set data.sequence_length=128 \
--set deepspeed.train_micro_batch_size_per_gpu=2 --set deepspeed.gradient_accumulation_steps=1"
MPIRUN = "mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 -np 2"


def proportional_set_size(process):
    """Kilobytes of a process and all that it has started."""
    total, left = 0, [process]
    while left:
        current = left.pop()
        try:
            with open(f"/proc/{current}/task/{current}/children") as children:
                left += [int(child) for child in children.read().split()]
            with open(f"/proc/{current}/smaps_rollup") as rollup:
                total += sum(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
        except OSError:
            pass  # It has ended meanwhile.
    return total


def run(command, **options):
    """Runs a command; what it printed, and gigabytes at most."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options)
    peak = 0

    def watch():
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, proportional_set_size(process.pid))
            time.sleep(0.4)

    watcher = threading.Thread(target=watch)
    watcher.start()
    printed = process.communicate()[0]
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}")
    return printed, peak / 2**20


def train(launcher):
    """Seconds of each step but the first, and gigabytes."""
    with tempfile.TemporaryDirectory() as output:
        program = ["target/release/finetune", *JOB.split(), "--output-dir", output]
        _, memory = run([*launcher, *program])
        with open(os.path.join(output, "metrics.jsonl")) as rows:
            return [json.loads(row)["step_seconds"] for row in rows][1:], memory


def peer(command):
    printed, memory = run(command, shell=True)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    return [json.loads(lines[-1])["med"]], memory


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", metavar="COMMAND")
    parser.add_argument("--mpirun", default=MPIRUN)
    options = parser.parse_args()
    runs = {"threads": lambda: train([]), "processes": lambda: train(shlex.split(options.mpirun))}
    if options.peer:
        runs["peer"] = lambda: peer(options.peer)
    times, memory = {name: [] for name in runs}, {name: 0 for name in runs}
    for _ in range(options.rounds):
        for name, measure in runs.items():
            seconds, peak = measure()
            times[name] += seconds
            memory[name] = max(memory[name], peak)
    base = statistics.median(times["threads"])
    for name in runs:
        median = statistics.median(times[name])
        print(f"{name:10} {median:6.2f} s  {median / base:5.2f} of threads  {memory[name]:5.2f} GB")


if __name__ == "__main__":
    main()
