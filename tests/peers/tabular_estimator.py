# In the manner of sklearn wrappers: an estimator with fit and predict, standardised columns, early stopping.
import copy

import numpy as np
import torch
from peer_data import Numbered, save
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader


class NetClassifier(ClassifierMixin, BaseEstimator):
    def __init__(self, hidden=16, lr=0.05, max_epochs=6, batch_size=32, patience=2, random_state=0):
        self.hidden, self.lr, self.max_epochs, self.batch_size = hidden, lr, max_epochs, batch_size
        self.patience, self.random_state = patience, random_state

    def fit(self, X, y):
        torch.manual_seed(self.random_state)
        self.classes_ = np.unique(y)
        X_train, X_valid, y_train, y_valid = train_test_split(X, y, test_size=0.2, random_state=self.random_state)
        self.net_ = torch.nn.Sequential(
            torch.nn.Linear(X.shape[1], self.hidden), torch.nn.ReLU(), torch.nn.Linear(self.hidden, len(self.classes_))
        )
        optimizer = torch.optim.SGD(self.net_.parameters(), lr=self.lr, momentum=0.9)
        rows = list(zip(torch.tensor(X_train, dtype=torch.float32), torch.tensor(y_train)))
        loader = DataLoader(Numbered(rows, True), batch_size=self.batch_size, shuffle=True)
        best, waited, self.history_, self.steps_ = np.inf, 0, [], 0
        for _ in range(self.max_epochs):
            self.net_.train()
            for xb, yb in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(self.net_(xb), yb).backward()
                optimizer.step()
                self.steps_ += 1
            loss = -np.log(self.predict_proba(X_valid)[np.arange(len(y_valid)), y_valid]).mean()
            self.history_.append(float(loss))
            if loss < best - 1e-4:
                best, waited, state = loss, 0, copy.deepcopy(self.net_.state_dict())
            elif (waited := waited + 1) >= self.patience:
                break
        self.net_.load_state_dict(state)
        return self

    @torch.no_grad()
    def predict_proba(self, X):
        self.net_.eval()
        return torch.softmax(self.net_(torch.tensor(X, dtype=torch.float32)), 1).numpy().astype("float64")

    def predict(self, X):
        return self.classes_[self.predict_proba(X).argmax(1)]


X, y = load_breast_cancer(return_X_y=True)
X, y = StandardScaler().fit_transform(X)[:300], y[:300]
model = NetClassifier().fit(X[:220], y[:220])
save(model.net_, model.steps_, [*model.history_, float(model.score(X[220:], y[220:]))])
