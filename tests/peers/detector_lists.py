# In the manner of torchvision's detectors: lists of images of any size, lists of dicts as targets, a dict of losses.
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from peer_data import Numbered, save
from torch.utils.data import DataLoader

norm = sys.argv[1]  # images: each image by its own boxes, then by images; boxes: by the boxes of the batch
torch.manual_seed(6)


def scenes(count, seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(count):
        height, width = 8 + 2 * (i % 3), 8 + 2 * (i % 4)
        image = torch.randn(3, height, width, generator=g)
        boxes = torch.rand(i % 4 + (norm == "boxes"), 4, generator=g)  # some images are empty
        labels = torch.randint(1, 3, (len(boxes),), generator=g)
        rows.append((image, {"boxes": boxes, "labels": labels, "image_id": i}))
    return rows


def collate_fn(batch):
    return tuple(zip(*batch))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.classes, self.places = nn.Conv2d(8, 3, 1), nn.Conv2d(8, 4, 1)

    def batched(self, images):
        high, wide = (max(image.shape[axis] for image in images) for axis in (1, 2))
        high, wide = 16, max(16, wide, high)  # so that padding does not depend on the batch
        return torch.stack([F.pad(i, (0, wide - i.shape[2], 0, high - i.shape[1])) for i in images])

    def forward(self, images, targets=None):
        features = self.backbone(self.batched(images))
        logits = self.classes(features).flatten(2).transpose(1, 2)
        places = self.places(features).flatten(2).transpose(1, 2)
        if targets is None:
            return logits, places
        classification, regression, count = [], [], 0
        for one, where, target in zip(logits, places, targets):
            anchors = (target["boxes"][:, :2] * 8).long()
            cells = anchors[:, 0] * 8 + anchors[:, 1]
            wanted = torch.zeros(len(one), dtype=torch.long)
            wanted[cells] = target["labels"]
            boxes = max(1, len(cells))
            count += len(cells)
            by = boxes if norm == "images" else 1
            classification.append(F.cross_entropy(one, wanted, reduction="sum") / by)
            regression.append(F.smooth_l1_loss(where[cells], target["boxes"], reduction="sum") / by)
        total = len(targets) if norm == "images" else max(1, count)
        return {"classification": sum(classification) / total, "bbox_regression": sum(regression) / total}


def train_one_epoch(model, optimizer, data_loader):
    model.train()
    for images, targets in data_loader:
        loss_dict = model(list(images), [{k: v for k, v in t.items()} for t in targets])
        losses = sum(loss for loss in loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
    return len(data_loader)


@torch.inference_mode()
def evaluate(model, data_loader):
    model.train()  # for its losses
    return sum(float(sum(model(list(images), list(targets)).values())) for images, targets in data_loader)


data_loader = DataLoader(Numbered(scenes(39, 1), True), batch_size=8, shuffle=True, collate_fn=collate_fn)
data_loader_test = DataLoader(Numbered(scenes(10, 2), False), batch_size=5, collate_fn=collate_fn)
model = Detector()
params = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=5e-4)
lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
steps, losses = 0, []
for epoch in range(3):
    steps += train_one_epoch(model, optimizer, data_loader)
    lr_scheduler.step()
    losses.append(evaluate(model, data_loader_test))
save(model, steps, losses)
