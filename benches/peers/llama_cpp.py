"""Generates tokens with llama.cpp from a GGUF file, greedily, and prints the speed that llama.cpp reports.

llama_cpp.py FILE TOKENS
"""

import json
import os
import sys

import xllamacpp

PROMPT = "It was a dark and stormy night"


def main():
    file, tokens = sys.argv[1], int(sys.argv[2])
    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_ctx = 512
    parameters.n_parallel = 1
    parameters.n_gpu_layers = 0
    parameters.cpuparams.n_threads = int(os.environ["OMP_NUM_THREADS"])
    server = xllamacpp.Server(parameters)
    request = {"prompt": PROMPT, "n_predict": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    found = server.handle_completions({**request, "stream": False})
    found = found if isinstance(found, dict) else json.loads(found)
    timings = found["timings"]
    assert timings["predicted_n"] == tokens, timings
    print("tokens per second:", timings["predicted_per_second"], flush=True)
    # Its threads do not end.
    os._exit(0)


if __name__ == "__main__":
    main()
