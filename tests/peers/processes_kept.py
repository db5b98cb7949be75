# Loader processes that stay, early stopping by the validation loss, the best checkpoint kept and loaded.
import copy

import torch
from peer_data import points, save
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scaled(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        x, y = self.rows[i]
        return {"x": (x / 2).numpy(), "y": int(y), "name": f"row{i}"}


def main():
    torch.manual_seed(0)
    rows = points(70, 1)
    generator = torch.Generator()
    generator.manual_seed(3)
    train = DataLoader(
        Scaled(rows[:52]), batch_size=12, shuffle=True, num_workers=2, persistent_workers=True, generator=generator
    )
    valid = DataLoader(Scaled(rows[52:]), batch_size=12, num_workers=1)
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    best, best_state, patience, steps, history = float("inf"), None, 0, 0, []
    for epoch in range(8):
        model.train()
        for batch in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["x"].float()), batch["y"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps += 1
        model.eval()
        total = 0.0
        with torch.inference_mode():
            for batch in valid:
                total += nn.functional.cross_entropy(model(batch["x"].float()), batch["y"], reduction="sum").item()
        history.append(total / 18)
        if history[-1] < best - 5e-3:
            best, patience = history[-1], 0
            best_state = copy.deepcopy(model)
            torch.save({"model": model.state_dict(), "opt": optimizer.state_dict(), "epoch": epoch}, "best.pt")
            torch.save(model, "whole.pt")
        else:
            patience += 1
            if patience > 1:
                break
    checkpoint = torch.load("best.pt")
    model.load_state_dict(checkpoint["model"])
    for a, b in zip(model.parameters(), best_state.parameters()):
        assert torch.equal(a, b)
    save(model, steps, history)


if __name__ == "__main__":
    main()
