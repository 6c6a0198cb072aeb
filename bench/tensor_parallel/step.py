"""One rank of bench_tensor_parallel in PyTorch: the same as step.cpp, with torch.distributed.tensor on gloo."""

import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

WIDTH, HEAD, BLOCKS, BATCH, TOKENS = 256, 64, 4, 8, 128


class Block(nn.Module):
    """Has separate q, k and v, because DTensor would not split one layer of three times the width by heads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.attention_input, self.mlp_input = nn.Identity(), nn.Identity()

    def forward(self, x):
        normed = self.attention_input(self.first(x))
        q, k, v = (each(normed).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_input(self.second(x)))))


def plan(kind):
    if kind == "plain":
        return {"q": ColwiseParallel(), "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel(), "up": ColwiseParallel(),
                "down": RowwiseParallel()}
    from torch.distributed.tensor import Replicate

    # One all-gather for q, k and v.
    enter = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return {"first": SequenceParallel(), "second": SequenceParallel(), "attention_input": enter, "mlp_input": enter, "q": ColwiseParallel(),
            "k": ColwiseParallel(), "v": ColwiseParallel(), "out": RowwiseParallel(output_layouts=Shard(1)), "up": ColwiseParallel(),
            "down": RowwiseParallel(output_layouts=Shard(1))}


def main():
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    nets = {}
    for kind in ("plain", "sequence"):
        torch.manual_seed(1)
        net = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        for block in net:
            parallelize_module(block, mesh, plan(kind))
        nets[kind] = net, torch.optim.SGD(net.parameters(), 1e-3, foreach=False)
    print("ready", flush=True)
    for line in sys.stdin:
        kind, steps = line.split()
        net, optimizer = nets[kind]
        dist.barrier()
        torch.manual_seed(2)
        begin = time.perf_counter()
        for _ in range(int(steps)):
            inputs, targets = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)
            if kind == "sequence":
                part = TOKENS // dist.get_world_size()
                inputs, targets = (each.narrow(1, dist.get_rank() * part, part) for each in (inputs, targets))
            optimizer.zero_grad()
            F.mse_loss(net(inputs), targets).backward()
            optimizer.step()
        print((time.perf_counter() - begin) / int(steps) * 1e3, flush=True)


if __name__ == "__main__":
    main()
