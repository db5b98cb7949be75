# Small data for the trainers, and a list of the samples that were read for training.
import os

import torch

seen = []
device = os.environ.get("PEER_DEVICE", "cpu")


class Numbered(torch.utils.data.Dataset):
    def __init__(self, rows, is_for_training):
        self.rows, self.is_for_training = rows, is_for_training

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        if self.is_for_training:
            seen.append(int(i))
        return self.rows[i]


def points(count, seed):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return list(zip(x, (x.sum(1) > 0).long()))


def texts(count, seed, has_classes):
    ids = torch.randint(0, 50, (count, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row.sum() % 3 if has_classes else row} for row in ids]


def save(model, steps, losses):
    torch.save({"model": model.state_dict(), "seen": seen, "steps": steps, "losses": losses}, "result.pt")
