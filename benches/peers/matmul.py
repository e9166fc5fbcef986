"""Measures torch.matmul for products of [m, k] and [k, n] and prints a line of JSON with the GFLOP/s of each.

An argument such as `f32:768x3072x512:tn` has the type, M, K and N, and the layouts of both operands. `t` means that
the transpose of an operand is stored. The output has the same fields as the output of
`cargo bench -p deepburn-kernels --bench gemm -- --json`.
"""

import argparse
import json
import statistics
import time

import torch

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def operand(rows, columns, order, dtype, generator):
    """Returns a matrix of random numbers, stored in row-major order (`n`) or column-major order (`t`)."""
    sizes = (rows, columns) if order == "n" else (columns, rows)
    stored = torch.randn(*sizes, generator=generator).to(DTYPES[dtype])
    return stored if order == "n" else stored.t()


def measure(shape, dtype, orders, options):
    """Returns the rates of `repeats` products, after the same number of uncounted products."""
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(42)
    left = operand(rows, inner, orders[0], dtype, generator)
    right = operand(inner, columns, orders[1], dtype, generator)
    output = torch.empty(rows, columns, dtype=DTYPES[dtype])
    rates = []
    for repeat in range(2 * options.repeats):
        start = time.perf_counter()
        torch.matmul(left, right, out=output)
        seconds = time.perf_counter() - start
        if repeat >= options.repeats:
            rates.append(2e-9 * rows * inner * columns / seconds)
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("products", nargs="+", metavar="DTYPE:MxKxN:ORDERS")
    parser.add_argument("--threads", type=int, help="by default one a core")
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    for product in options.products:
        dtype, sizes, orders = product.split(":")
        shape = [int(size) for size in sizes.split("x")]
        rates = measure(shape, dtype, orders, options)
        found = {"shape": shape, "dtype": dtype, "threads": torch.get_num_threads()}
        spread = [min(rates), max(rates)]
        print(json.dumps({**found, "gflops_median": statistics.median(rates), "spread": spread}), flush=True)


if __name__ == "__main__":
    main()
