"""Trains GPT-2 with PyTorch's DistributedDataParallel over gloo.

With bf16, weights and optimizer states are in bf16, too.
"""

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
    training.distributed_steps(options, model)


if __name__ == "__main__":
    main()
