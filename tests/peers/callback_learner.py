# In the manner of fast.ai's course: a Learner that raises exceptions through callbacks, one-cycle, hooks, partials.
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from peer_data import Numbered, points, save
from torch import nn, optim
from torch.utils.data import DataLoader


class CancelFitException(Exception):
    pass


class Callback:
    order = 0

    def __getattr__(self, name):
        return getattr(self.learn, name)


class TrainCB(Callback):
    def predict(self):
        self.learn.preds = self.learn.model(self.learn.batch[0])

    def get_loss(self):
        self.learn.loss = self.learn.loss_func(self.learn.preds, self.learn.batch[1])

    def backward(self):
        self.learn.loss.backward()

    def step(self):
        self.learn.opt.step()

    def zero_grad(self):
        self.learn.opt.zero_grad()


class OneCycle(Callback):
    def before_fit(self):
        total = len(self.learn.dls.train) * self.learn.n_epochs
        self.sched = optim.lr_scheduler.OneCycleLR(self.learn.opt, 0.3, total_steps=total)

    def after_batch(self):
        if self.learn.model.training:
            self.sched.step()


class Recorder(Callback):
    order = 1

    def before_fit(self):
        self.steps, self.valid = 0, []

    def after_batch(self):
        if self.learn.model.training:
            self.steps += 1
        else:
            self.total += self.learn.loss.item() * len(self.learn.batch[0])

    def before_epoch(self):
        self.total = 0.0

    def after_epoch(self):
        if not self.learn.model.training:
            self.valid.append(self.total)
        if len(self.valid) >= 3:
            raise CancelFitException()


class Learner:
    def __init__(self, model, dls, loss_func, opt_func, cbs):
        self.model, self.dls, self.loss_func, self.opt_func, self.cbs = model, dls, loss_func, opt_func, cbs
        for cb in cbs:
            cb.learn = self

    def __call__(self, name):
        for cb in sorted(self.cbs, key=lambda cb: cb.order):
            method = getattr(type(cb), name, None)
            if method is not None:
                method(cb)

    def one_epoch(self, train):
        self.model.train(train)
        self.dl = self.dls.train if train else self.dls.valid
        self("before_epoch")
        for self.batch in self.dl:
            self("predict")
            self("get_loss")
            if self.model.training:
                self("backward")
                self("step")
                self("zero_grad")
            self("after_batch")
        self("after_epoch")

    def fit(self, n_epochs):
        self.n_epochs = n_epochs
        self.opt = self.opt_func(self.model.parameters())
        self("before_fit")
        try:
            for self.epoch in range(n_epochs):
                self.one_epoch(True)
                with torch.no_grad():
                    self.one_epoch(False)
        except CancelFitException:
            pass


torch.manual_seed(42)
dls = SimpleNamespace(
    train=DataLoader(Numbered(points(50, 1), True), batch_size=12, shuffle=True),
    valid=DataLoader(Numbered(points(20, 2), False), batch_size=24),
)
recorder = Recorder()
model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.LayerNorm(20), nn.Linear(20, 2))
learn = Learner(
    model, dls, F.cross_entropy, partial(optim.SGD, lr=0.1, momentum=0.9), [TrainCB(), OneCycle(), recorder]
)
learn.fit(5)
save(model, recorder.steps, recorder.valid)
