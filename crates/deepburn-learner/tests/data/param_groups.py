"""Losses of PyTorch's optimizers with parameter groups, for tests/training/param_groups.rs, which describes the net.

    pip install torch==2.9
    python param_groups.py > param_groups.json
"""
import json
import torch

STEPS, BATCH, WARMUP = 20, 6, 4


def values(count, seed):
    return torch.tensor([((seed + i) * 37 % 101) / 101 - 0.4 for i in range(1, count + 1)])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.middle = torch.nn.Linear(7, 7)
        self.head = torch.nn.Linear(7, 3)
        for seed, parameter in enumerate(self.parameters()):
            # Burn stores the weight of a linear layer as [in, out].
            shape = tuple(reversed(parameter.shape))
            parameter.data = values(parameter.numel(), 1000 * seed).reshape(shape).permute(*reversed(range(len(shape)))).contiguous()

    def forward(self, x):
        return self.head(torch.tanh(self.middle(torch.tanh(self.norm(self.first(x))))))


def losses(optimizer, groups):
    net = Net()
    rates = [group["lr"] for group in groups(net)]
    optimizer = optimizer(groups(net))
    found = []
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates):
            # Like DeepSpeed's WarmupLR, which keeps its minimum for two steps.
            group["lr"] = rate * min(1.0, max(0, step - 1) / WARMUP)
        x = values(BATCH * 5, 31 * step).reshape(BATCH, 5)
        y = values(BATCH * 3, 17 * step + 5).reshape(BATCH, 3)
        loss = ((net(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def adamw(net):
    return [
        {"params": [net.first.weight], "lr": 0.02, "weight_decay": 0.1},
        {"params": [net.first.bias, net.norm.weight, net.norm.bias], "lr": 0.02, "weight_decay": 0.0},
        # middle is frozen.
        {"params": [net.head.weight], "lr": 0.005, "weight_decay": 0.3, "betas": (0.7, 0.95)},
        {"params": [net.head.bias], "lr": 0.005, "weight_decay": 0.3, "betas": (0.7, 0.95)},
    ]


def sgd(net):
    return [
        {"params": [net.first.weight, net.middle.weight], "lr": 0.1, "weight_decay": 0.01},
        {"params": [net.first.bias, net.norm.weight, net.norm.bias, net.middle.bias], "lr": 0.05, "weight_decay": 0.2},
        {"params": [net.head.weight, net.head.bias], "lr": 0.1, "weight_decay": 0.01},
    ]


print(json.dumps({
    "adamw": losses(lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8), adamw),
    "sgd": losses(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9), sgd),
}, indent=1))
