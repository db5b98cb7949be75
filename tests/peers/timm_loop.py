# A loop in the way of timm's own training program, with its parts: timm_loop.py [bf16] [mixup]
import argparse
import logging
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import vision_ops  # noqa: F401 - before torchvision
from peer_data import Numbered, save
from PIL import Image
from timm import utils
from timm.data import Mixup, create_loader
from timm.loss import SoftTargetCrossEntropy
from timm.models import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import NativeScaler

args = argparse.Namespace(model="test_vit", device="cpu", seed=42, epochs=2, batch_size=8, accumulated=2, clip_grad=1.0)
utils.setup_default_logging()
device = utils.init_distributed_device(args)
logging.info("worker %d of %d", args.rank, args.world_size)
utils.random_seed(args.seed, args.rank)

model = create_model(args.model, num_classes=4, drop_rate=0.0).to(device)
optimizer = create_optimizer_v2(model, opt="momentum", lr=0.05, weight_decay=0.01)
is_half = "bf16" in sys.argv
amp = torch.autocast("cpu", dtype=torch.bfloat16) if is_half else nullcontext()
scaler = NativeScaler(device="cpu") if is_half else None
ema = utils.ModelEmaV3(model, decay=0.9)
if args.distributed:
    model = torch.nn.parallel.DistributedDataParallel(model)
    group = torch.distributed.new_group(backend="gloo")


def pictures(count, seed):
    rows = np.random.default_rng(seed).integers(0, 256, (count, 160, 160, 3), dtype=np.uint8)
    return [(Image.fromarray(row), int(row.sum()) % 4) for row in rows]


class Pictures(Numbered):
    transform = None

    def __getitem__(self, i):
        picture, label = super().__getitem__(i)
        return self.transform(picture), label


common = {"input_size": (3, 160, 160), "batch_size": args.batch_size, "use_prefetcher": False, "num_workers": 0}
loader_train = create_loader(
    Pictures(pictures(32, 1), True), is_training=True, no_aug=True, distributed=args.distributed, **common
)
loader_eval = create_loader(Pictures(pictures(12, 2), False), distributed=args.distributed, **common)
mixup = Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, num_classes=4) if "mixup" in sys.argv else None
train_loss = SoftTargetCrossEntropy() if mixup else torch.nn.CrossEntropyLoss()
updates = (len(loader_train) + args.accumulated - 1) // args.accumulated
scheduler, epochs = create_scheduler_v2(
    optimizer, "cosine", num_epochs=args.epochs, step_on_epochs=False, updates_per_epoch=updates
)
saver = None
if utils.is_primary(args):
    Path("out").mkdir(exist_ok=True)
    saver = utils.CheckpointSaver(model, optimizer, args, ema, scaler, checkpoint_dir="out", recovery_dir="out")


def train_one_epoch(epoch, done):
    model.train()
    optimizer.zero_grad()
    meter = utils.AverageMeter()
    for number, (x, y) in enumerate(loader_train):
        if mixup:
            x, y = mixup(x, y)
        need_update = (number + 1) % args.accumulated == 0 or number + 1 == len(loader_train)
        with amp:
            loss = train_loss(model(x), y) / args.accumulated
        if scaler is not None:
            scaler(loss, optimizer, args.clip_grad, parameters=model.parameters(), need_update=need_update)
        else:
            loss.backward()
            if need_update:
                utils.dispatch_clip_grad(model.parameters(), args.clip_grad)
                optimizer.step()
        if need_update:
            done += 1
            optimizer.zero_grad()
            ema.update(model, step=done)
            scheduler.step_update(num_updates=done)
        meter.update(loss.item() * args.accumulated, x.size(0))
    return done


def validate(which):
    which.eval()
    meter = utils.AverageMeter()
    with torch.no_grad():
        for x, y in loader_eval:
            loss = torch.nn.functional.cross_entropy(which(x), y)
            if args.distributed:
                loss = utils.reduce_tensor(loss, args.world_size)
            meter.update(loss.item(), x.size(0))
    return meter.avg


losses, done = [], 0
for epoch in range(epochs):
    if args.distributed:
        loader_train.sampler.set_epoch(epoch)
    done = train_one_epoch(epoch, done)
    if args.distributed:
        utils.distribute_bn(model, args.world_size, True)
    losses += [validate(model), validate(ema)]
    if saver is not None:
        best, _ = saver.save_checkpoint(epoch, metric=losses[-1])
    scheduler.step(epoch + 1, losses[-1])
save(getattr(model, "module", model), done, losses)
