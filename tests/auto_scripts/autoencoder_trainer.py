# An autoencoder trained by a small framework of its own: closures, callbacks, a log file.
import logging
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader

os.makedirs("runs", exist_ok=True)
logging.basicConfig(
    level=logging.INFO, handlers=[logging.FileHandler("runs/train.log", mode="w")], format="%(message)s"
)
logger = logging.getLogger("autoencoder")


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x):
        return self.layers(x)


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())

    def training_loss(self, batch):
        # The parts are called, never the module itself.
        return nn.functional.mse_loss(self.decoder(self.encoder(batch)), batch)


class Trainer:
    def __init__(self, model, max_epochs, callbacks=()):
        self.model, self.max_epochs, self.callbacks = model, max_epochs, callbacks
        self.optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        self.global_step = 0

    def fit(self, train_dataloader):
        for self.epoch in range(self.max_epochs):
            losses = [self.training_step(batch) for batch in train_dataloader]
            for callback in self.callbacks:
                callback(self, sum(losses) / len(losses))

    def training_step(self, batch):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model.training_loss(batch)
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)
        self.global_step += 1
        return loss.item()


def log_loss(trainer, loss):
    logger.info("epoch %d step %d loss %.5f", trainer.epoch, trainer.global_step, loss)


def save(trainer, loss):
    with open(f"runs/epoch{trainer.epoch}.pt", "wb") as file:
        torch.save(trainer.model.state_dict(), file)


torch.manual_seed(11)
pixels = torch.tensor(load_digits().data, dtype=torch.float32)[:800] / 16
trainer = Trainer(AutoEncoder(), max_epochs=2, callbacks=[log_loss, save])
trainer.fit(DataLoader(pixels, batch_size=40, shuffle=True))
torch.save({"model": trainer.model.state_dict(), "steps": trainer.global_step}, "autoencoder.pt")
