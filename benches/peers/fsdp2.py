"""Trains GPT-2 with PyTorch's FSDP2 (`fully_shard`) over gloo.

`fully_shard` is applied to each block and to the model. With bf16, parameters are all-gathered in bf16, gradients are
reduce-scattered in fp32, and sharded parameters and optimizer states are in fp32.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import training


def main():
    options = training.parser(__doc__).parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy()
    if options.dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = training.gpt2(options)
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    training.distributed_steps(options, model)


if __name__ == "__main__":
    main()
