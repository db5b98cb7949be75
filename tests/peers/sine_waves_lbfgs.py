# In the manner of torch's time_sequence_prediction: L-BFGS with a closure on all data at once, in float64.
import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from peer_data import save


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 8)
        self.linear = nn.Linear(8, 1)

    def forward(self, input, future=0):
        outputs = []
        h, c = (torch.zeros(input.size(0), 8, dtype=torch.double) for _ in range(2))
        for input_t in input.split(1, dim=1):
            h, c = self.lstm1(input_t, (h, c))
            output = self.linear(h)
            outputs += [output]
        for _ in range(future):
            h, c = self.lstm1(output, (h, c))
            output = self.linear(h)
            outputs += [output]
        return torch.cat(outputs, dim=1)


np.random.seed(0)
torch.manual_seed(0)
starts = np.random.randint(-40, 40, 6).reshape(6, 1)
data = np.sin((np.arange(24) + starts) / 4.0).astype("float64")
input, target = torch.from_numpy(data[2:, :-1]), torch.from_numpy(data[2:, 1:])
test_input, test_target = torch.from_numpy(data[:2, :-1]), torch.from_numpy(data[:2, 1:])
seq = Sequence().double()
criterion = nn.MSELoss()
optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=5)
losses = []
for _ in range(3):

    def closure():
        optimizer.zero_grad()
        loss = criterion(seq(input), target)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        losses.append(criterion(seq(test_input, future=5)[:, :-5], test_target).item())
save(seq, 3, losses)
