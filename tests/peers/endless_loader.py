# Loaders of other people's making: endless_loader.py {repeat,thread,prefetch}
import queue
import sys
import threading

import torch
from peer_data import Numbered, points, save
from torch import nn
from torch.utils.data import DataLoader

kind = sys.argv[1]
torch.manual_seed(12)


class RepeatSampler:
    """Never ends, so that loader processes live on (YOLO, timm)."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class EndlessLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        object.__setattr__(self, "batch_sampler", RepeatSampler(self.batch_sampler))
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class Background(threading.Thread):
    """A thread that fetches ahead (prefetch_generator)."""

    def __init__(self, iterator, ahead=3):
        super().__init__(daemon=True)
        self.iterator, self.waiting = iterator, queue.Queue(ahead)
        self.start()

    def run(self):
        for item in self.iterator:
            self.waiting.put(item)
        self.waiting.put(None)

    def __iter__(self):
        while (item := self.waiting.get()) is not None:
            yield item


class BackgroundLoader(DataLoader):
    def __iter__(self):
        return iter(Background(super().__iter__()))


class Prefetcher:
    """One batch ahead (apex, timm)."""

    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        batch = None
        for following in self.loader:
            if batch is not None:
                yield batch
            batch = [one.clone() for one in following]
        yield batch


def make(rows, is_for_training):
    data, options = Numbered(rows, is_for_training), {"batch_size": 9, "shuffle": is_for_training}
    if kind == "repeat":
        return EndlessLoader(data, **options)
    if kind == "thread":
        return BackgroundLoader(data, **options)
    return Prefetcher(DataLoader(data, **options))


def main():
    loader, valid = make(points(50, 1), True), make(points(20, 2), False)
    model = nn.Sequential(nn.Linear(6, 14), nn.ReLU(), nn.Linear(14, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    steps, losses = 0, []
    for epoch in range(3):
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
        model.eval()
        with torch.no_grad():
            losses.append(sum(nn.functional.cross_entropy(model(x), y, reduction="sum").item() for x, y in valid))
    save(model, steps, losses)


if __name__ == "__main__":
    main()
