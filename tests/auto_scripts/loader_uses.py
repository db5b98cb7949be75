# The ways in which scripts and trainers use loaders: each a small training of its own.
import itertools
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler


class Points(Dataset):
    def __init__(self, n, seed):
        self.x = torch.randn(n, 5, generator=torch.Generator().manual_seed(seed))
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], torch.as_tensor(i)


class Stream(IterableDataset):
    def __init__(self, points):
        self.points = points

    def __iter__(self):
        order = torch.randperm(len(self.points)).tolist()
        return (self.points[i] for i in order)


class Run:
    """One model and what it saw."""

    def __init__(self, dropout=0.0):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Dropout(dropout), nn.Linear(12, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.5)
        self.seen, self.values, self.steps = [], [], 0

    def loss(self, batch):
        x, y, i = batch
        self.seen += i.tolist()
        return cross_entropy(self.model(x), y)

    def step(self, *losses):
        for loss in losses:
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        self.steps += 1

    def evaluate(self, loader):
        self.model.eval()
        total = count = 0
        for x, y, _ in loader:
            with torch.no_grad():
                total += cross_entropy(self.model(x), y, reduction="sum").item()
            count += len(y)
        self.values += [total / count, count]


def trainer_library():
    # The model is in eval mode until the first step, each batch is fetched before the last one is used,
    # and an evaluation follows every epoch.
    def ahead(loader):
        batches = iter(loader)
        now = next(batches)
        for following in batches:
            yield now
            now = following
        yield now

    run = Run()
    run.model.eval()
    for _ in range(2):
        for batch in ahead(train):
            run.model.train()
            run.step(run.loss(batch))
        run.evaluate(val)
    return run


def window_of_batches():
    # Gradient accumulation that fetches all batches of a step at once.
    run = Run()
    batches = iter(train)
    while window := list(itertools.islice(batches, 2)):
        run.optimizer.zero_grad()
        for batch in window:
            (run.loss(batch) / len(window)).backward()
        run.step()
    return run


def validation_first():
    run = Run()
    shuffled = DataLoader(Points(23, 2), batch_size=6, shuffle=True)
    run.evaluate(shuffled)
    for k, batch in enumerate(train):
        if k % 3 == 0:
            run.evaluate(shuffled)
            run.model.train()
        run.step(run.loss(batch))
    return run


def forgotten_eval_mode():
    run = Run()
    for _ in range(2):
        for x, y, i in DataLoader(Points(23, 2), batch_size=6, shuffle=True):
            with torch.no_grad():
                run.values += [i.sum().item(), len(y)]
                run.model(x)
        for batch in train:
            run.step(run.loss(batch))
    run.values = [sum(run.values[::2]), sum(run.values[1::2])]
    return run


def statistics_first():
    run = Run()
    sums = torch.zeros(5)
    count = 0
    for x, _, _ in train:
        sums += x.sum(0)
        count += len(x)
    run.values = [*(sums / count).tolist(), count]
    for batch in train:
        run.step(run.loss(batch))
    return run


def both_uses_of_one_loop():
    run = Run()

    def loop(loader, trains):
        run.model.train(trains)
        total = 0.0
        for batch in loader:
            with torch.set_grad_enabled(trains):
                loss = cross_entropy(run.model(batch[0]), batch[1])
            if trains:
                run.seen += batch[2].tolist()
                run.step(loss)
            else:
                total += loss.item() * len(batch[1])
        return total

    for _ in range(2):
        loop(train, True)
        run.values += [loop(train, False), loop(val, False)]
    return run


def two_loaders():
    run = Run()
    other = DataLoader(Points(45, 4), batch_size=8, shuffle=True)
    for labelled, more in zip(train, other):
        run.step(run.loss(labelled) + 0.5 * run.loss(more))
    return run


def cycled():
    run = Run()
    for _, batch in zip(range(14), itertools.cycle(train)):
        run.step(run.loss(batch))
    return run


def cycled_copies():
    # As to another device: what the modules see are other tensors than what the loader gave.
    run = Run()
    for _, (x, y, i) in zip(range(14), itertools.cycle(train)):
        run.step(run.loss((x.clone(), y.clone(), i)))
    return run


def endless():
    run = Run()
    batches = iter(train)
    for _ in range(14):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(train)
            batch = next(batches)
        run.step(run.loss(batch))
    return run


def processes():
    run = Run()
    kind = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(Points(45, 1), batch_size=8, shuffle=True, **kind)
    for _ in range(2):
        for batch in loader:
            run.step(run.loss(batch))
    return run


def processes_of_a_stream():
    # Kept alive, for training and for an evaluation in turn.
    class InOrder(Stream):
        def __iter__(self):
            return (self.points[i] for i in range(len(self.points)))

    run = Run()
    kind = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    loader = DataLoader(InOrder(Points(48, 1)), batch_size=12, **kind)
    for _ in range(2):
        run.model.train()
        for batch in loader:
            run.step(run.loss(batch))
        run.evaluate(loader)
    return run


def frozen_statistics():
    run = Run()
    run.model.eval()
    for loader in (train, DataLoader(Points(45, 1), batch_size=8)):
        for batch in loader:
            run.step(run.loss(batch))
    return run


def lists_of_indices():
    class Listed(Points):
        def __getitem__(self, i):
            return self.x[i], self.y[i], torch.tensor(i)

    run = Run()
    points = Listed(45, 1)
    for batch in DataLoader(points, sampler=BatchSampler(RandomSampler(points), 8, False), batch_size=None):
        run.step(run.loss(batch))
    return run


def stream():
    run = Run()
    run.model.eval()
    for _ in range(2):
        for batch in DataLoader(Stream(Points(45, 1)), batch_size=8):
            run.model.train()
            run.step(run.loss(batch))
    return run


def one_step_per_epoch():
    run = Run()
    loader = DataLoader(Points(48, 1), batch_size=8, shuffle=True)
    for _ in range(3):
        run.step(sum(run.loss(batch) for batch in loader))
    return run


def stream_for_reading():
    # Refused: the stream's processes deal it out, and cannot bring what the other workers got.
    class InOrder(Stream):
        def __iter__(self):
            return (self.points[i] for i in range(len(self.points)))

    run = Run()
    kind = {"num_workers": 1, "multiprocessing_context": "fork"}
    run.values = [sum(len(x) for x, _, _ in DataLoader(InOrder(Points(48, 1)), batch_size=12, **kind))]
    return run


def collected():
    # Refused: the loader is read before anybody can know what for.
    run = Run()
    for batch in [tuple(part.clone() for part in batch) for batch in train]:
        run.step(run.loss(batch))
    return run


torch.manual_seed(0)
train = DataLoader(Points(45, 1), batch_size=8, shuffle=True)
val = DataLoader(Points(20, 2), batch_size=8)
ways = [trainer_library, window_of_batches, validation_first, forgotten_eval_mode, statistics_first]
ways += [both_uses_of_one_loop, two_loaders, cycled, endless, processes, frozen_statistics, lists_of_indices, stream]
ways += [one_step_per_epoch, cycled_copies]
if sys.argv[1:]:
    ways = [globals()[name] for name in sys.argv[1:]]
results = {}
for way in ways:
    train = DataLoader(Points(45, 1), batch_size=8, shuffle=True)
    run = way()
    print(way.__name__, run.steps, "steps")
    results[way.__name__] = {
        "model": run.model.state_dict(),
        "seen": torch.tensor(run.seen),
        "values": torch.tensor(run.values, dtype=torch.float64),
        "steps": run.steps,
    }
torch.save(results, "uses.pt")
