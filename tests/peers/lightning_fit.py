# Lightning: lightning_fit.py [accumulate] [middle] [kept]; sanity steps as by default
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peer_data import Numbered, device, points, save
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        self.losses = []

    def training_step(self, batch, _):
        return torch.nn.functional.cross_entropy(self.net(batch[0].view(-1, 6)), batch[1])

    def validation_step(self, batch, _):
        self.log("val_loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        self.losses.append(float(self.trainer.callback_metrics.get("val_loss", -1)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


lightning.seed_everything(0)
model = Classifier()
trainer = lightning.Trainer(
    max_epochs=3,
    accelerator="cpu" if device == "cpu" else "gpu",
    devices=1,
    logger=False,
    enable_checkpointing="kept" in sys.argv,
    callbacks=[ModelCheckpoint("kept", monitor="val_loss", save_top_k=2, save_last=True)] if "kept" in sys.argv else [],
    enable_progress_bar=False,
    enable_model_summary=False,
    accumulate_grad_batches=2 if "accumulate" in sys.argv else 1,
    val_check_interval=3 if "middle" in sys.argv else 1.0,
)
trainer.fit(
    model,
    DataLoader(Numbered(points(45, 1), True), batch_size=8, shuffle=True),
    DataLoader(Numbered(points(20, 2), False), batch_size=8),
)
save(model, trainer.global_step, model.losses)
