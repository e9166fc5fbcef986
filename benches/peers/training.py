"""Common code of the peers: options, model, random tokens, the timed training loop and its output.

Rank 0 prints JSON objects, one per line: `{"ready": true}` before the first step, then an object for each step with
`step`, `seconds`, `tokens` of all ranks and `loss`.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist

SEED = 42
LEARNING_RATE = 1e-4
MAX_NORM = 1.0
VOCABULARY = 50257
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def parser(description):
    """Returns a parser with the options of every peer."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--model", default="{}", metavar="JSON", help="fields of the model's configuration")
    options.add_argument("--sequences", type=int, default=4, help="sequences of a micro-batch, on each rank")
    options.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    options.add_argument("--compile", action="store_true", help="train with torch.compile")
    options.add_argument("--recompute", action="store_true", help="compute the activations of blocks again in backward")
    return options


def gpt2_config(options):
    # On a machine with a GPU, `transformers` may be missing. Its script does not need it.
    from transformers import GPT2Config

    # The cache of keys and values is not used in training.
    return GPT2Config(**{**NO_DROPOUT, "use_cache": False, **json.loads(options.model)})


def gpt2(options):
    """Returns a randomly initialized GPT-2 in fp32, without dropout."""
    from transformers import GPT2LMHeadModel

    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(gpt2_config(options)).train()
    if options.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def compiled(options, model):
    """Returns the model, compiled if this was asked for. The first step then compiles."""
    return torch.compile(model) if options.compile else model


def report(**fields):
    """Prints a line on rank 0. It is flushed, because the reader records its arrival time."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(fields), flush=True)


def timed_steps(options, step):
    """Calls `step(tokens)` with random tokens for each step. `step` returns the loss and the seconds of each phase."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(SEED + rank)
    vocabulary = json.loads(options.model).get("vocab_size", VOCABULARY)
    report(ready=True)
    for number in range(1, options.steps + 1):
        tokens = torch.randint(0, vocabulary, (options.sequences, options.length), generator=generator)
        start = time.perf_counter()
        loss, phases = step(tokens)
        seconds = time.perf_counter() - start
        report(step=number, seconds=seconds, tokens=tokens.numel() * ranks, loss=float(loss), **phases)


def distributed_steps(options, model):
    """Trains a wrapped model, and ends the process group. All ranks wait for each other after a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    run = compiled(options, model)

    def step(tokens):
        loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return loss.detach(), {}

    timed_steps(options, step)
    dist.destroy_process_group()
