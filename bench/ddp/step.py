"""One rank of bench_ddp in PyTorch: the same as step.cpp, with torch.nn.parallel.DistributedDataParallel on gloo."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, VOCABULARY, TOKENS = 256, 4, 4096, 128


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(1024, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 10)

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x).relu()).relu()).relu())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.token(ids) + self.position.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Seed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 1)

    def forward(self, x):
        return self.linear(x)


def batch_of(name):
    if name == "mlp":
        return torch.randn(32, 1024), torch.randint(10, (32,))
    if name == "gpt":
        return torch.randint(VOCABULARY, (4, TOKENS)), torch.randint(VOCABULARY, (4 * TOKENS,))
    return torch.randn(32, 10), torch.randn(32, 1)


def loss_of(name, output, targets):
    return F.mse_loss(output, targets) if name == "seed" else F.cross_entropy(output.reshape(-1, output.shape[-1]), targets)


def main():
    name, optimizer_name = sys.argv[1:3]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    make = {"mlp": Mlp, "gpt": Gpt, "seed": Seed}[name]
    torch.manual_seed(1)
    model = make()
    bare = model if os.environ.get("BENCH_STATE") else make()
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizers = [torch.optim.SGD(each.parameters(), 1e-3) if optimizer_name == "sgd" else torch.optim.AdamW(each.parameters(), 1e-3)
                  for each in (model, bare)]
    torch.manual_seed(2 + dist.get_rank())

    def step(call, optimizer):
        inputs, targets = batch_of(name)
        optimizer.zero_grad()
        loss_of(name, call(inputs), targets).backward()
        optimizer.step()

    def no_sync():
        with ddp.no_sync():
            step(ddp, optimizers[0])

    kinds = {"ddp": lambda: step(ddp, optimizers[0]), "local": lambda: step(bare, optimizers[1]), "no_sync": no_sync}
    print("ready", flush=True)
    for line in sys.stdin:
        kind, steps = line.split()
        if kind == "pss":
            with open("/proc/self/smaps_rollup") as rollup:
                print(next(int(row.split()[1]) for row in rollup if row.startswith("Pss:")) / 1024, flush=True)
            continue
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(int(steps)):
            kinds[kind]()
        print((time.perf_counter() - begin) / int(steps) * 1e3, flush=True)


if __name__ == "__main__":
    main()
