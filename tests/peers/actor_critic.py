# In the manner of torch's actor-critic: episodes of a game, actions drawn by torch, no loader.
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from peer_data import save
from torch.distributions import Categorical

torch.manual_seed(543)
rng = np.random.default_rng(1)


class Cart:
    def reset(self):
        self.state = rng.normal(size=4).astype("float32") * 0.1
        return self.state

    def step(self, action):
        push = np.float32(1.0 if action else -1.0)
        self.state = self.state * np.float32(0.98) + np.float32(0.1) * np.roll(self.state, 1)
        self.state[0] += push * np.float32(0.1)
        return self.state, 1.0, abs(self.state[0]) > 0.5


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 16)
        self.action_head, self.value_head = nn.Linear(16, 2), nn.Linear(16, 1)
        self.saved_actions, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


model, env = Policy(), Cart()
optimizer = optim.Adam(model.parameters(), lr=3e-2)
lengths = []
for _ in range(6):
    state = env.reset()
    for t in range(1, 30):
        probs, value = model(torch.from_numpy(state).float())
        m = Categorical(probs)
        action = m.sample()
        model.saved_actions.append((m.log_prob(action), value))
        state, reward, done = env.step(action.item())
        model.rewards.append(reward)
        if done:
            break
    R, returns = 0, []
    for r in model.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std(correction=0) + 1e-6)
    policy_losses, value_losses = [], []
    for (log_prob, value), R in zip(model.saved_actions, returns):
        policy_losses.append(-log_prob * (R - value.item()))
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    optimizer.zero_grad()
    (torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()).backward()
    optimizer.step()
    lengths.append(float(t))
    del model.rewards[:], model.saved_actions[:]
save(model, 6, lengths)
