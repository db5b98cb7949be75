# fastai's Learner with its own loaders, one cycle, a callback that saves the best: fastai_learner.py
import fastai.callback.schedule  # noqa: F401 - fit_one_cycle
import torch
import vision_ops  # noqa: F401 - before torchvision
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.torch_core import set_seed
from peer_data import Numbered, points, save

set_seed(3, reproducible=True)
dls = DataLoaders.from_dsets(Numbered(points(45, 1), True), Numbered(points(20, 2), False), bs=8, num_workers=0)
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
learner = Learner(dls, model, loss_func=torch.nn.functional.cross_entropy, cbs=SaveModelCallback())
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(3, 0.01)
save(learner.model, learner.train_iter, [float(row[1]) for row in learner.recorder.values])
