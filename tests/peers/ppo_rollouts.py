# In the manner of single-file PPO: rollouts in arrays, minibatches by shuffled indices, no loader.
import numpy as np
import torch
from peer_data import save
from torch import nn
from torch.distributions import Categorical

np.random.seed(1)
torch.manual_seed(1)
agent = nn.ModuleDict({"actor": nn.Linear(3, 2), "critic": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))})
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2, eps=1e-5)
state, steps, losses = torch.zeros(4, 3), 0, []
for update in range(3):
    obs, actions, logprobs, rewards = [], [], [], []
    for step in range(8):
        with torch.no_grad():
            pi = Categorical(logits=agent["actor"](state))
            action = pi.sample()
        obs.append(state), actions.append(action), logprobs.append(pi.log_prob(action))
        state = 0.9 * state + torch.from_numpy(np.random.randn(4, 3).astype("float32")) * 0.1
        state[:, 0] += action.float() - 0.5
        rewards.append(-state[:, 0].abs())
    b_obs, b_actions, b_logprobs = torch.cat(obs), torch.cat(actions), torch.cat(logprobs)
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0).flatten()
    b_inds = np.arange(len(b_obs))
    for epoch in range(2):
        np.random.shuffle(b_inds)
        for start in range(0, len(b_inds), 16):
            mb = b_inds[start : start + 16]
            pi = Categorical(logits=agent["actor"](b_obs[mb]))
            value = agent["critic"](b_obs[mb]).flatten()
            advantage = returns[mb] - value.detach()
            ratio = (pi.log_prob(b_actions[mb]) - b_logprobs[mb]).exp()
            pg_loss = -torch.min(advantage * ratio, advantage * ratio.clamp(0.8, 1.2)).mean()
            loss = pg_loss - 0.01 * pi.entropy().mean() + 0.5 * (value - returns[mb]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
            steps += 1
    losses.append(loss.item())
save(agent, steps, losses)
