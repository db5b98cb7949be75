# Logistic regression by L-BFGS with a line search, in a few large batches.
import torch
from sklearn.datasets import load_breast_cancer
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
X, y = load_breast_cancer(return_X_y=True)
X = torch.tensor((X - X.mean(0)) / X.std(0), dtype=torch.float64)
y = torch.tensor(y, dtype=torch.float64)
loader = DataLoader(TensorDataset(X, y), batch_size=285)

model = torch.nn.Linear(30, 1).double()
optimizer = torch.optim.LBFGS(model.parameters(), lr=1, max_iter=6, line_search_fn="strong_wolfe")
calls = 0
for epoch in range(2):
    for inputs, labels in loader:

        def closure():
            global calls
            calls += 1
            optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(inputs).squeeze(-1), labels)
            loss = loss + 1e-3 * model.weight.pow(2).sum()
            loss.backward()
            return loss

        loss = optimizer.step(closure)
    print(f"epoch {epoch}: loss {loss.item():.6f}")
torch.save({"model": model.state_dict(), "calls": calls}, "lbfgs.pt")
