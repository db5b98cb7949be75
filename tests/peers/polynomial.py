# In the manner of torch's regression example: batches drawn in the loop, one linear layer, updates by hand.
from itertools import count

import torch
import torch.nn.functional as F
from peer_data import save

torch.manual_seed(7)
POLY_DEGREE = 4
W_target = torch.randn(POLY_DEGREE, 1) * 5
b_target = torch.randn(1) * 5


def make_features(x):
    return torch.cat([x.unsqueeze(1) ** i for i in range(1, POLY_DEGREE + 1)], 1)


def get_batch(batch_size=32):
    x = make_features(torch.randn(batch_size))
    return x, x.mm(W_target) + b_target.item()


fc = torch.nn.Linear(W_target.size(0), 1)
for batch_idx in count(1):
    batch_x, batch_y = get_batch()
    fc.zero_grad()
    output = F.smooth_l1_loss(fc(batch_x), batch_y)
    loss = output.item()
    output.backward()
    for param in fc.parameters():
        param.data.add_(-0.1 * param.grad)
    if loss < 1e-3 or batch_idx == 40:
        break
save(fc, batch_idx, [loss])
