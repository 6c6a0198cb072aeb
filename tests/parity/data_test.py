"""Compare Lockstep's samplers, DataLoader, random_split and .npy files with PyTorch's and NumPy's: the same indices in the same
batches, and the same draws from the generators, as numbers drawn afterwards show.

usage: data_test.py PROBE
"""
import itertools
import os
import random
import subprocess
import sys
import tempfile
import warnings

import numpy as np
import torch
from torch.utils import data

warnings.simplefilter("ignore")


def generator(seed):
    return None if seed < 0 else torch.Generator().manual_seed(seed)


def draws(*generators):
    return [int(torch.randint(1 << 30, (1,), generator=g)) for g in generators for _ in range(3)]


def both(g):
    """Return the default generator and the given one."""
    return draws(None, g) if g is not None else draws(None)


def distributed(size, ranks, rank, seed, epoch, shuffle, drop_last, batch):
    sampler = data.DistributedSampler(range(size), ranks, rank, bool(shuffle), seed, bool(drop_last))
    sampler.set_epoch(epoch)
    return [len(sampler), *sampler]


def sampled(sampler, g):
    return [*sampler, *sampler, *both(g)]


def random_sampler(seed, generator_seed, size, replacement, num_samples, batch):
    torch.manual_seed(seed)
    g = generator(generator_seed)
    return sampled(data.RandomSampler(range(size), bool(replacement), num_samples or None, g), g)


def subset(seed, generator_seed, indices, batch):
    torch.manual_seed(seed)
    g = generator(generator_seed)
    return sampled(data.SubsetRandomSampler(indices, g), g)


def weighted(seed, generator_seed, weights, num_samples, replacement, batch):
    torch.manual_seed(seed)
    g = generator(generator_seed)
    return sampled(data.WeightedRandomSampler(weights, num_samples, bool(replacement), g), g)


def split(seed, generator_seed, size, parts):
    torch.manual_seed(seed)
    g = generator(generator_seed)
    numbers = [int(p) if p == int(p) and sum(parts) != 1 else p for p in parts]
    subsets = data.random_split(range(size), numbers, g if g is not None else torch.default_generator)
    return [x for s in subsets for x in (len(s), *s.indices)] + both(g)


def loader(seed, generator_seed, size, batch, shuffle, drop_last, workers, passes):
    torch.manual_seed(seed)
    g = generator(generator_seed)
    y = torch.arange(size)
    dataset = data.TensorDataset(torch.stack([y, y], 1).float(), y)
    loader = data.DataLoader(dataset, batch, bool(shuffle), drop_last=bool(drop_last), num_workers=workers, generator=g)
    out = [len(loader)]
    for most in passes:
        for _, labels in loader:
            out += [len(labels), *labels.tolist()]
            most -= 1
            if most == 0:
                break
    return out + both(g)


def shared(seed, size, ranks, rank, batch, workers):
    torch.manual_seed(seed)
    y = torch.arange(size)
    sampler = data.DistributedSampler(y, ranks, rank, seed=seed)
    loader = data.DataLoader(data.TensorDataset(y), batch, sampler=sampler, num_workers=workers)
    out = [len(loader)]
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for (labels,) in loader:
            out += [len(labels), *labels.tolist()]
    return out + draws(None)


def interleaved(seed, size, batch):
    torch.manual_seed(seed)
    loader = data.DataLoader(data.TensorDataset(torch.arange(size)), batch, True)
    a, b = iter(loader), iter(loader)
    out = []
    for (x,) in a:
        out += x.tolist() + next(b)[0].tolist()
    return out + draws(None)


TYPES = {"bool": 11, "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7,
         "complex64": 9, "complex128": 10, "uint16": 27, "uint32": 28, "uint64": 29}


def npy(path):
    array = np.load(path)
    plain = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))
    return [TYPES[plain.dtype.name], array.ndim, *array.shape, *plain.tobytes()]


KINDS = {"distributed": distributed, "random": random_sampler, "subset": subset, "weighted": weighted, "split": split,
         "loader": loader, "shared": shared, "interleaved": interleaved, "npy": npy}


def cases(folder):
    rng = random.Random(7)
    sizes = [0, 1, 2, 3, 5, 7, 8, 16, 31, 64, 100, 1000]
    for size, ranks, shuffle, drop_last in itertools.product(sizes, [1, 2, 3, 4, 7, 8, 16], [0, 1], [0, 1]):
        for rank in {0, ranks // 2, ranks - 1}:
            yield "distributed", dict(size=size, ranks=ranks, rank=rank, seed=rng.choice([0, 1, 42, -3, 2**40]), epoch=rng.choice([0, 1, 9]),
                                      shuffle=shuffle, drop_last=drop_last, batch=rng.choice([1, 3, 32]))
    # Python's randperm uses another algorithm from about this size on.
    for size in (29999, 30001, 100003):
        yield "distributed", dict(size=size, ranks=3, rank=1, seed=5, epoch=2, shuffle=1, drop_last=0, batch=32)
    for seed, g, size, replacement in itertools.product([0, 3], [-1, 11], [1, 10, 64, 33], [0, 1]):
        for num_samples in (0, 1, 31, 32, 64, 100):
            yield "random", dict(seed=seed, generator=g, size=size, replacement=replacement, num_samples=num_samples,
                                 batch=rng.choice([1, 7, 32, 64]))
    for seed, g in itertools.product([0, 4], [-1, 5]):
        for _ in range(4):
            count = rng.randint(1, 40)
            yield "subset", dict(seed=seed, generator=g, indices=[rng.randint(0, 99) for _ in range(count)], batch=8)
            weights = [round(rng.random(), 3) + 0.001 for _ in range(count)]
            yield "weighted", dict(seed=seed, generator=g, weights=weights, num_samples=rng.randint(1, 80), replacement=1, batch=8)
            yield "weighted", dict(seed=seed, generator=g, weights=weights, num_samples=rng.randint(1, count), replacement=0, batch=8)
    for size, parts in ((10, [3, 7]), (30, [0.3, 0.3, 0.4]), (31, [0.5, 0.5]), (7, [0.1] * 10), (100, [1, 0]), (5, [1]),
                        (100, [60, 40, 0]), (17, [0.25, 0.25, 0.25, 0.25]), (1000, [0.7, 0.2, 0.1])):
        for g in (-1, 9):
            yield "split", dict(seed=2, generator=g, size=size, parts=parts)
    for size, batch, shuffle, drop_last, g in itertools.product([1, 5, 32, 33, 100], [1, 4, 32, 50], [0, 1], [0, 1], [-1, 6]):
        yield "loader", dict(seed=rng.randint(0, 99), generator=g, size=size, batch=batch, shuffle=shuffle, drop_last=drop_last,
                             workers=0, passes=rng.choice([[0], [0, 0, 0], [1, 0], [2, 1, 0]]))
    for size, workers, shuffle, g, passes in ((33, 1, 1, -1, [0, 0]), (33, 2, 1, 6, [0, 0]), (100, 2, 1, 6, [1, 0]), (12, 2, 0, -1, [0]),
                                              (100, 2, 1, -1, [2, 0])):
        yield "loader", dict(seed=8, generator=g, size=size, batch=4, shuffle=shuffle, drop_last=0, workers=workers, passes=passes)
    for size, ranks, batch in itertools.product([5, 64, 101], [1, 2, 4], [4, 32]):
        yield "shared", dict(seed=rng.randint(0, 9), size=size, ranks=ranks, rank=ranks - 1, batch=batch, workers=0)
    yield "shared", dict(seed=3, size=33, ranks=2, rank=1, batch=4, workers=2)
    for size, batch in ((10, 3), (12, 4), (1, 1)):
        yield "interleaved", dict(seed=4, size=size, batch=batch)
    for number, (name, shape, order, byteorder) in enumerate(itertools.product(TYPES, [(), (4,), (2, 3), (0, 5), (2, 3, 4)], "CF", "<>")):
        array = np.arange(24)[: int(np.prod(shape))].reshape(shape)
        array = np.array(array % 2 if name == "bool" else array, dtype=np.dtype(name).newbyteorder(byteorder), order=order)
        path = os.path.join(folder, f"{number}.npy")
        np.save(path, array)
        yield "npy", dict(path=path)
    for number, version in enumerate([(1, 0), (2, 0), (3, 0)]):
        path = os.path.join(folder, f"version{number}.npy")
        with open(path, "wb") as file:
            np.lib.format.write_array(file, np.arange(6.0).reshape(2, 3), version)
        yield "npy", dict(path=path)


def as_line(kind, arguments):
    return " ".join([kind] + [f"{k}={','.join(map(str, v)) if isinstance(v, list) else v}" for k, v in arguments.items()])


def main():
    with tempfile.TemporaryDirectory() as folder:
        asked = list(cases(folder))
        lines = [as_line(*each) for each in asked]
        answers = subprocess.run([sys.argv[1]], input="\n".join(lines), text=True, capture_output=True, check=True).stdout.splitlines()
        assert len(answers) == len(asked), f"{len(answers)} answers to {len(asked)} cases"
        wrong = 0
        for (kind, arguments), line, answer in zip(asked, lines, answers):
            if "generator" in arguments:
                arguments = dict(arguments, generator_seed=arguments["generator"])
                del arguments["generator"]
            expected = " ".join(map(str, KINDS[kind](**arguments)))
            if answer.strip() != expected:
                wrong += 1
                print(f"{line}\n  Lockstep {answer[:300]}\n  PyTorch  {expected[:300]}")
    counts = {kind: sum(k == kind for k, _ in asked) for kind in KINDS}
    print(f"{len(asked) - wrong} of {len(asked)} cases are the same:", ", ".join(f"{n} {k}" for k, n in counts.items()))
    sys.exit(wrong != 0 or len(asked) < 1000)


main()
