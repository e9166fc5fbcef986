#!/usr/bin/env python3
"""Memory and time of peers on GPT-2 XL (1.5B parameters), fp32, Adam, steps of 1 x 256 tokens on the CPU.

    python3 -m venv venv && venv/bin/pip install torch==2.9.0 deepspeed==0.19.8 transformers==5.23.0 numpy ninja
    apt-get install libaio-dev
    python3 benches/peers_xl.py --python venv/bin/python --nvme /mnt/nvme --limit 17e9 torch deepspeed

Each peer runs in a memory cgroup of --limit bytes (version 1, as root), in which a peer that needs more is killed.
`torch` is an eager loop, `deepspeed` is ZeRO-3 with optimizer states and parameters on NVMe, in one rank.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

WIDTH, HEADS, VOCABULARY, POSITIONS = 1600, 25, 50257, 1024
TOKENS = 256
CGROUP = pathlib.Path("/sys/fs/cgroup/memory/deepburn-peers-xl")


def parameters(layers):
    """Elements of GPT-2 XL; the output layer is the table of tokens."""
    block = 12 * WIDTH**2 + 13 * WIDTH
    return (VOCABULARY + POSITIONS) * WIDTH + layers * block + 2 * WIDTH


def config(layers):
    from transformers import GPT2Config

    return GPT2Config(
        n_layer=layers, n_embd=WIDTH, n_head=HEADS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )


def timed(steps, step):
    """Prints a line for each step, so that what was done before a kill is known."""
    import torch

    for number in range(steps):
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS))
        start = time.perf_counter()
        loss = step(tokens)
        seconds = time.perf_counter() - start
        print(json.dumps({"step": number + 1, "seconds": seconds, "loss": float(loss)}), flush=True)


def train_torch(options):
    import torch
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(config(options.layers))
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    print(json.dumps({"phase": "made"}), flush=True)

    def step(tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    timed(options.steps, step)


def train_deepspeed(options):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in [("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)]:
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    import deepspeed
    import torch
    from transformers import GPT2LMHeadModel

    nvme = {"device": "nvme", "nvme_path": options.nvme, "pin_memory": False}
    plan = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 100_000_000,
            "stage3_max_live_parameters": 200_000_000,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 20_000_000,
            # With its pipelines an assertion fails: they need more buffers than its default of 4.
            "offload_optimizer": nvme,
            # A buffer holds the largest parameter, the table of tokens.
            "offload_param": {**nvme, "max_in_cpu": 0, "buffer_size": 100_000_000},
        },
        "aio": {"block_size": 1048576, "queue_depth": 8},
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=plan):
        model = GPT2LMHeadModel(config(options.layers))
    if options.checkpointing:
        model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=plan
    )
    print(json.dumps({"phase": "made"}), flush=True)

    def step(tokens):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss

    timed(options.steps, step)


PEERS = {"torch": train_torch, "deepspeed": train_deepspeed}


def limited(limit):
    """Runs in the child: joins a cgroup of `limit` bytes."""
    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "memory.limit_in_bytes").write_text(str(limit))
    (CGROUP / "memory.max_usage_in_bytes").write_text("0")
    (CGROUP / "tasks").write_text(str(os.getpid()))


def peak_resident(log):
    """Largest resident set of the command, in bytes, as /usr/bin/time saw it."""
    found = re.search(r"Maximum resident set size \(kbytes\): (\d+)", log)
    return int(found[1]) * 1024 if found else None


def measure(peer, options):
    command = ["/usr/bin/time", "-v", options.python, __file__, peer, "--inside"]
    command += ["--steps", str(options.steps), "--nvme", options.nvme, "--layers", str(options.layers)]
    # DeepSpeed builds its ops with the ninja beside its interpreter.
    path = os.pathsep.join([os.path.dirname(options.python), os.environ["PATH"]])
    if options.checkpointing:
        command.append("--checkpointing")
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        run = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PATH": path},
            preexec_fn=lambda: limited(options.limit),
        )
        log.seek(0)
        said = log.read()
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    oom = int(re.search(r"oom_kill (\d+)", (CGROUP / "memory.oom_control").read_text())[1])
    status = run.returncode
    found = {
        "peer": peer,
        "status": status,
        "killed_for_memory": oom,
        "peak_resident_bytes": peak_resident(said),
        "was_made": any("phase" in line for line in lines),
        "seconds": [round(line["seconds"], 1) for line in lines if "step" in line],
        "seconds_in_all": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(found), flush=True)
    if status and not oom:
        print("\n".join(said.splitlines()[-60:-23]), file=sys.stderr)
    CGROUP.rmdir()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="+", choices=PEERS)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the peers")
    parser.add_argument("--nvme", required=True, help="folder on a local disk, with 40 GB free")
    parser.add_argument("--limit", type=lambda text: int(float(text)), default=17_000_000_000)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--layers", type=int, default=48, help="fewer than those of XL, to try it out")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return PEERS[options.peers[0]](options)
    count = parameters(options.layers)
    states = {"parameters": count, "bytes_of_states_with_adam": 16 * count}
    print(json.dumps(states), flush=True)
    for peer in options.peers:
        measure(peer, options)


if __name__ == "__main__":
    main()
