"""Lightning with Poseidon: ``poseidon run --nproc 2 lightning_train.py``, or with --hosts, or by torchrun or srun."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import poseidon.trainers.lightning  # noqa: F401 - registers strategy="poseidon"


class Regression(lightning.LightningModule):
    """A line to fit."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(32, 1)

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(strategy="poseidon", max_epochs=2, logger=False, enable_progress_bar=False)
    trainer.fit(Regression(), data)
    print(f"worker {trainer.global_rank} of {trainer.world_size}: {trainer.global_step} steps")
