"""The same training in PyTorch: the model, data, random numbers and optimizer of main.cpp, with torch's own
DistributedDataParallel, sampler and loader. It prints the same lines.

usage: python digits.py --data DIR [--epochs N] [--batch-size N] [--seed S]
       torchrun --nproc-per-node 2 digits.py --data DIR ...
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        conv = lambda i, o: nn.Conv2d(i, o, 3, padding=1, bias=False)
        self.features = nn.Sequential(conv(1, 24), nn.BatchNorm2d(24), nn.ReLU(), conv(24, 48), nn.BatchNorm2d(48), nn.ReLU(),
                                      nn.MaxPool2d(2), conv(48, 48), nn.BatchNorm2d(48), nn.ReLU())
        self.classes = nn.Linear(48 * 4 * 4, 10)

    def forward(self, x):
        return self.classes(self.features(x).flatten(1))


def read_npy(path, dtype):
    """Reads without NumPy, which torch does not require."""
    with open(path, "rb") as file:
        data = file.read()
    begin = 10 + int.from_bytes(data[8:10], "little")
    return torch.frombuffer(bytearray(data[begin:]), dtype=dtype)


def augmented(images, seed):
    generator = torch.Generator().manual_seed(seed)
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    shifts = torch.randint(0, 3, (images.size(0), 2), generator=generator).tolist()
    moved = [padded[i].narrow(1, a, 8).narrow(2, b, 8) for i, (a, b) in enumerate(shifts)]
    return torch.stack(moved) + 0.03 * torch.randn(images.shape, generator=generator)


def accuracy(model, images, labels):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in zip(images.split(128), labels.split(128)))
    model.train()
    return 100 * right / len(labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)

    images = read_npy(os.path.join(options.data, "images.npy"), torch.float32).view(-1, 1, 8, 8)
    labels = read_npy(os.path.join(options.data, "labels.npy"), torch.int64)
    tested = torch.arange(len(images)) % 6 == 5
    train = TensorDataset(images[~tested], labels[~tested])

    model = Net()
    ddp = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05, foreach=False)
    sampler = DistributedSampler(train, ranks, rank, seed=options.seed)
    loader = DataLoader(train, options.batch_size // ranks, sampler=sampler)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)

    begin, done = time.monotonic(), 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        position = 0
        for x, y in loader:
            position += options.batch_size
            draw = epoch * len(train) + min(position, len(train))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(augmented(x, options.seed + 1000 * draw + rank)), y)
            loss.backward()
            optimizer.step()
            last = loss.item()
            done += len(x) * ranks
        schedule.step()
        if ranks > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        # Every rank tests on all samples, because PyTorch's sampler would count some of them twice.
        right = accuracy(model, images[tested], labels[tested])
        if rank == 0:
            print(f"epoch {epoch + 1:2}/{options.epochs}  loss {last:.4f}  test {right:.2f} %  {done / (time.monotonic() - begin):.0f} samples/s",
                  flush=True)
    if ranks > 1:
        dist.barrier()
        os._exit(0)  # destroy_process_group() sometimes aborts in 2.13.


main()
