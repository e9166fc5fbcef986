"""Compares PyTorch's AdamW with DeepBurn's Adam step on the parameters of GPT-2 (124,439,808 in 148 tensors).

    cargo bench -p deepburn-kernels --bench adam --no-run   # prints the program's path
    python crates/deepburn-kernels/benches/peer_adamw.py PROGRAM [ROUNDS]

Each round runs PROGRAM, which times DeepBurn's steps, and then times one step of each of PyTorch's
variants with the same number of threads. The script prints medians over the rounds. For each
PyTorch variant, it also prints the median ratio of PyTorch's time to DeepBurn's time for the same
layout. Needs torch (measured with 2.9.0).
"""

import os
import re
import statistics
import subprocess
import sys
import time

import torch

WIDTH = 768
LAYER = [
    (WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,),
    (WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,),
]  # fmt: skip
GPT2 = [(50257, WIDTH), (1024, WIDTH), *(12 * LAYER), (WIDTH,), (WIDTH,)]
VARIANTS = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
OURS = {"flat": "adam flat", "148 tensors": "adam 148 tensors"}


def optimizer(shapes, variant):
    """Returns AdamW over new parameters with gradients, after a first step that initializes its states."""
    parameters = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    adamw = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01, **VARIANTS[variant])
    adamw.step()
    return adamw


def seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def ours(program):
    """Returns the seconds of each case that the program prints, which are medians over three rounds."""
    printed = subprocess.run([program, "3"], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^(\S.*?) +(\d+\.\d+) s ", printed, re.MULTILINE)
    return {case: float(number) for case, number in found}


def main():
    program, rounds = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 7
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    elements = sum(torch.Size(shape).numel() for shape in GPT2)
    layouts = {"flat": [(elements,)], "148 tensors": GPT2}
    assert len(GPT2) == 148 and elements == 124_439_808

    times = {}
    for _ in range(rounds):
        for case, measured in ours(program).items():
            times.setdefault(case, []).append(measured)
        for layout, shapes in layouts.items():
            for variant in VARIANTS:
                adamw = optimizer(shapes, variant)
                times.setdefault((layout, variant), []).append(seconds(adamw.step))
                del adamw

    print(f"{elements} elements, {threads} threads, torch {torch.__version__}, {rounds} rounds")
    for case, measured in times.items():
        line = f"{statistics.median(measured):8.4f} s"
        if isinstance(case, str):
            print(f"{case:<28} {line}")
            continue
        layout, variant = case
        ratio = statistics.median(t / o for t, o in zip(measured, times[OURS[layout]], strict=True))
        print(f"{'torch ' + layout + ' ' + variant:<28} {line} {ratio:6.2f} times ours")


if __name__ == "__main__":
    main()
