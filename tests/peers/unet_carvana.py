# In the manner of a well-known U-Net repository: random_split, RMSprop, autocast, dice, a plateau, checkpoints.
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import Numbered, device, save
from torch.utils.data import DataLoader, random_split

torch.manual_seed(0)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inc = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 12, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        self.outc = nn.Conv2d(12, 1, 1)

    def forward(self, x):
        x1 = self.inc(x)
        return self.outc(torch.cat([x1, self.up(self.down(x1))], 1))


class Pictures:
    def __init__(self, count):
        g = torch.Generator().manual_seed(1)
        self.images = torch.rand(count, 3, 8, 8, generator=g)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return {"image": self.images[i].contiguous(), "mask": (self.images[i].mean(0) > 0.5).float(), "number": i}


def dice_loss(input, target):
    inter = 2 * (input * target).sum(dim=(-1, -2))
    return (1 - (inter + 1e-6) / (input.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2)) + 1e-6)).mean()


def train_model(model, epochs, batch_size, amp, learning_rate, dir_checkpoint):
    global steps
    dataset = Pictures(50)
    n_val = int(len(dataset) * 0.2)
    train_set, val_set = random_split(dataset, [50 - n_val, n_val], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(Numbered(train_set, True), shuffle=True, batch_size=batch_size, num_workers=0)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, batch_size=batch_size, num_workers=0)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=learning_rate, momentum=0.9, eps=1e-3, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    grad_scaler = torch.amp.GradScaler(device, enabled=amp)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(1, epochs + 1):
        model.train()
        for batch in train_loader:
            images, true_masks = batch["image"].to(device), batch["mask"].to(device)
            with torch.autocast(device, enabled=amp, dtype=torch.bfloat16):
                masks_pred = model(images).squeeze(1)
                loss = criterion(masks_pred, true_masks.float())
                loss += dice_loss(F.sigmoid(masks_pred), true_masks.float())
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            steps += 1
        val_score = evaluate(model, val_loader)
        losses.append(val_score)
        scheduler.step(val_score)
        Path(dir_checkpoint).mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), str(Path(dir_checkpoint) / f"checkpoint_epoch{epoch}.pth"))


@torch.inference_mode()
def evaluate(net, dataloader):
    net.eval()
    score = 0
    for batch in dataloader:
        # Not rounded to masks: a score that jumps would tell nothing about small differences.
        score += 1 - dice_loss(F.sigmoid(net(batch["image"].to(device)).squeeze(1)), batch["mask"].to(device))
    net.train()
    return float(score / max(len(dataloader), 1))


steps, losses = 0, []
model = UNet().to(device, memory_format=torch.channels_last)
train_model(model, 2, 6, "float32" not in sys.argv, 1e-3, "checkpoints")
model.load_state_dict(torch.load("checkpoints/checkpoint_epoch2.pth"))
save(model, steps, losses)
