# Draws its own batches, trains by hand and stops by the loss of one of them, read before its backward.
import torch

torch.manual_seed(4)
model = torch.nn.Linear(5, 1)
read = []
while not read or read[-1] > 0.01:
    x = torch.randn(16, 5)
    loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    read.append(loss.item())
    model.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        parameter.data.add_(-0.1 * parameter.grad)
torch.save({"read": torch.tensor(read), "model": model.state_dict()}, "own.pt")
