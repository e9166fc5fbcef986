"""Losses and final weights of Muon and LAMB on the net of tests/training/mlp.rs.

    pip install torch==2.9 deepspeed==0.19.8
    python optimizers.py > optimizers.json

The differences between the variants are printed to stderr. Every variant is trained for 20 steps with a
constant learning rate. For each variant, optimizers.json contains

    losses    the losses before each of the steps
    weights   the weights after the last step, by Burn's names; matrices in Burn's layout ([in, out]), row by row

muon            torch.optim.Muon for the matrices, torch.optim.AdamW for biases and the norm, all in f32
muon_f64        the same in f64, to distinguish rounding errors of f32 from differences in the formula
muon_bf16       PyTorch's unmodified optimizer, with the Newton-Schulz iteration in bfloat16; the results depend on
                how the CPU adds products of bfloat16
muon_match_rms  `muon` with adjust_lr_fn="match_rms_adamw"
deepspeed_muon_standard, deepspeed_muon_gram
                DeepSpeed's SingleDeviceMuonWithAuxAdam, with its Newton-Schulz iterations in f32
lamb, lamb_no_bias_correction
                the formula of DeepSpeed's csrc/lamb/fused_lamb_cuda_kernel.cu, in f64
lamb_paper      algorithm 2 of You et al. 2020 (https://arxiv.org/abs/1904.00962), in f64
"""
import contextlib, json, os, sys

os.environ["DS_ACCELERATOR"] = "cpu"
# DeepSpeed compiles its update. Eager operations round in an order that does not depend on the compiler.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
import torch

with contextlib.redirect_stdout(sys.stderr):
    from deepspeed.runtime.zero.muon import original_muon

STEPS, BATCH = 20, 6
MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
LAMB = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
COEFFICIENTS = (0.01, 10.0)


def values(count, seed):
    return torch.tensor([((seed + i) * 37 % 101) / 101 - 0.4 for i in range(1, count + 1)])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # In PyTorch's layout: more rows than columns, as many rows as columns, fewer rows.
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.LayerNorm(7)
        self.middle = torch.nn.Linear(7, 7)
        self.head = torch.nn.Linear(7, 3)
        for seed, parameter in enumerate(self.parameters()):
            given = values(parameter.numel(), 1000 * seed)
            # Burn stores the weight of a linear layer as [in, out].
            given = given.reshape(parameter.shape) if parameter.ndim == 1 else given.reshape(parameter.T.shape).T
            parameter.data = given.contiguous()

    def forward(self, x):
        return self.head(torch.tanh(self.middle(torch.tanh(self.norm(self.first(x))))))

    def split(self):
        """The matrices, and everything else."""
        return [p for p in self.parameters() if p.ndim == 2], [p for p in self.parameters() if p.ndim != 2]

    def weights(self):
        names = {"norm.weight": "norm.gamma", "norm.bias": "norm.beta"}
        return {names.get(name, name): p.detach().T.flatten().tolist() if p.ndim == 2 else p.tolist()
                for name, p in self.named_parameters()}


def train(optimizer, dtype=torch.float32):
    """`optimizer` makes, of a net, the function that takes a step."""
    net = Net().to(dtype)
    step = optimizer(net)
    losses = []
    for number in range(STEPS):
        x = values(BATCH * 5, 31 * number).reshape(BATCH, 5).to(dtype)
        y = values(BATCH * 3, 17 * number + 5).reshape(BATCH, 3).to(dtype)
        loss = ((net(x) - y) ** 2).mean()
        net.zero_grad()
        loss.backward()
        step()
        losses.append(loss.item())
    return {"losses": losses, "weights": net.weights()}


@contextlib.contextmanager
def without_bfloat16():
    """torch.optim.Muon converts to bfloat16 what it orthogonalizes. Here it gets a copy of the same type instead."""
    published = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = torch.Tensor.clone
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = published


def torch_muon(published=False, **more):
    def optimizer(net):
        matrices, others = net.split()
        muon = torch.optim.Muon(matrices, **MUON, nesterov=True, ns_steps=5, **more)
        adamw = torch.optim.AdamW(others, **ADAMW)

        def step():
            with contextlib.nullcontext() if published else without_bfloat16():
                muon.step()
            adamw.step()
        return step
    return optimizer


def deepspeed_muon(ns_method):
    def optimizer(net):
        matrices, others = net.split()
        # By default it uses 16 bits if the CPU supports them.
        original_muon.ns_compute_dtype = lambda _: torch.float32
        return original_muon.SingleDeviceMuonWithAuxAdam([
            {"params": matrices, "use_muon": True, "ns_method": ns_method, **MUON},
            {"params": others, "use_muon": False, **ADAMW},
        ]).step
    return optimizer


def lamb(update):
    """`update` returns the direction, and the factor of the learning rate, of a step with a number from 1."""
    def optimizer(net):
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in net.parameters()]
        number = 0

        @torch.no_grad()
        def step():
            nonlocal number
            number += 1
            beta1, beta2 = LAMB["betas"]
            for p, (m, v) in zip(net.parameters(), moments):
                m.copy_(beta1 * m + (1 - beta1) * p.grad)
                v.copy_(beta2 * v + (1 - beta2) * p.grad ** 2)
                direction, factor = update(p, m, v, number)
                p -= LAMB["lr"] * factor * direction
        return step
    return optimizer


def corrections(step):
    return [1 - beta ** step for beta in LAMB["betas"]]


def deepspeed_lamb(bias_correction):
    # The kernel stores constants in f32, in which 1 - 0.999 has a relative error of 1.3e-5. This is not reproduced here.
    def update(p, m, v, step):
        direction = m / (v.sqrt() + LAMB["eps"]) + LAMB["weight_decay"] * p
        coefficient = 1.0
        if p.norm() != 0 and direction.norm() != 0:
            coefficient = (p.norm() / direction.norm()).clamp(*COEFFICIENTS).item()
        first, second = corrections(step) if bias_correction else (1.0, 1.0)
        # The bias correction is part of the learning rate: eps, decay and coefficient use uncorrected moments.
        return direction, coefficient * second ** 0.5 / first
    return lamb(update)


def paper_lamb(p, m, v, step):
    first, second = corrections(step)
    direction = (m / first) / ((v / second).sqrt() + LAMB["eps"]) + LAMB["weight_decay"] * p
    return direction, (p.norm() / direction.norm()).item()


def difference(one, other):
    losses = max(abs(a - b) for a, b in zip(one["losses"], other["losses"]))
    weights = max(abs(a - b) for name in one["weights"] for a, b in zip(one["weights"][name], other["weights"][name]))
    return f"losses {losses:.1e}, weights {weights:.1e}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {
        "muon": train(torch_muon()),
        "muon_f64": train(torch_muon(), torch.float64),
        "muon_bf16": train(torch_muon(published=True)),
        "muon_match_rms": train(torch_muon(adjust_lr_fn="match_rms_adamw")),
        "deepspeed_muon_standard": train(deepspeed_muon("standard")),
        "deepspeed_muon_gram": train(deepspeed_muon("gram")),
        "lamb": train(deepspeed_lamb(True), torch.float64),
        "lamb_no_bias_correction": train(deepspeed_lamb(False), torch.float64),
        "lamb_paper": train(lamb(paper_lamb), torch.float64),
    }
    for one, other in [("muon", "muon_f64"), ("muon", "muon_bf16"), ("muon", "muon_match_rms"),
                       ("muon", "deepspeed_muon_standard"), ("muon", "deepspeed_muon_gram"),
                       ("deepspeed_muon_standard", "deepspeed_muon_gram"), ("lamb", "lamb_no_bias_correction"),
                       ("lamb", "lamb_paper")]:
        print(f"{one}, {other}: {difference(found[one], found[other])}", file=sys.stderr)
    print(json.dumps(found, indent=1))
