"""Writes the checkpoints from which tests/training/deepspeed.rs resumes: torch.nn.Linear layers, one of them frozen,
trained by DeepSpeed on 2 ranks, and the losses of the following steps.

    pip install torch==2.9 deepspeed==0.19.8
    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 make.py

Writes linear_s2/ and linear_s3/: latest, global_step2/, trace.json.
"""
import json, os, pathlib
import deepspeed, torch

HERE = pathlib.Path(__file__).resolve().parent
GAS, SAVED, LAST = 2, 2, 6


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(3, 6)
        self.mix = torch.nn.Linear(6, 6)
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.down = torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.down(self.frozen(torch.tanh(self.mix(self.up(x)))))


def main(stage):
    torch.manual_seed(5)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": GAS, "gradient_clipping": 0.3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_min_lr": 0.001, "warmup_max_lr": 0.01,
                                                     "warmup_type": "linear"}},
        "zero_optimization": {"stage": stage},
    }
    net = Net()
    trained = [p for p in net.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=net, model_parameters=trained, config=config)
    rank, rows = torch.distributed.get_rank(), []
    for micro in range(LAST * GAS):
        seed = micro * 5 + rank
        x = torch.tensor([(seed * 7 + i * 3) % 11 / 11 for i in range(12)]).reshape(4, 3)
        loss = ((engine(x) - 0.5) ** 2).mean()
        engine.backward(loss)
        losses = [torch.zeros(()) for _ in range(2)]
        torch.distributed.all_gather(losses, loss.detach())
        engine.step()
        if micro >= SAVED * GAS:
            rows.append([float(loss) for loss in losses])
        if micro + 1 == SAVED * GAS:
            engine.save_checkpoint(HERE / f"linear_s{stage}")
    if rank == 0:
        (HERE / f"linear_s{stage}" / "trace.json").write_text(json.dumps({"ds": config, "losses": rows}, indent=1) + "\n")
        for name in ["zero_to_fp32.py", "zero_to_torch.py"]:
            (HERE / f"linear_s{stage}" / name).unlink(missing_ok=True)
    engine.destroy()


for stage in [2, 3]:
    main(stage)
