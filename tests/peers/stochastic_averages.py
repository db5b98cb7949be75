# In the manner of torch's SWA guide: AveragedModel, SWALR, update_bn at the end (here without batch norm in training).
import torch
from peer_data import Numbered, points, save
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader

torch.manual_seed(0)


class Still(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * 0 + x if self.training else super().forward(x)


model = nn.Sequential(nn.Linear(6, 12), Still(12, affine=False), nn.ReLU(), nn.Linear(12, 2))
loader = DataLoader(Numbered(points(40, 1), True), batch_size=8, shuffle=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
swa_model = AveragedModel(model)
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
swa_scheduler = SWALR(optimizer, swa_lr=0.05, anneal_epochs=1)
steps = 0
for epoch in range(4):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        ema_model.update_parameters(model)
        steps += 1
    if epoch >= 2:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
update_bn(loader, swa_model)
save(nn.ModuleList([swa_model.module[1], swa_model.module[3], ema_model.module[3], model[3]]), steps, [])
