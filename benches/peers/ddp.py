"""Trains GPT-2 with PyTorch's DistributedDataParallel over gloo.

With bf16, weights and optimizer states are in bf16, too.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import training


def main():
    options = training.parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    model = training.gpt2(options)
    if options.dtype == "bf16":
        model = model.bfloat16()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE)

    def step(tokens):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return loss.detach(), {}

    training.timed_steps(options, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
