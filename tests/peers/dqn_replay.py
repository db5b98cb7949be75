# In the manner of deep Q-learning with a loader: the agent plays between batches, which are drawn from its memory.
import random
from collections import deque, namedtuple

import torch
import torch.nn as nn
from peer_data import save
from torch.utils.data import DataLoader, IterableDataset

Experience = namedtuple("Experience", "state action reward done next_state")
random.seed(1)
torch.manual_seed(1)


class Corridor:
    """Walk to the right end of a corridor."""

    def reset(self):
        self.place, self.time = 2, 0
        return self.state()

    def state(self):
        return torch.eye(6)[self.place]

    def step(self, action):
        self.place = max(0, min(5, self.place + (1 if action else -1)))
        self.time += 1
        return self.state(), float(self.place == 5) - 0.1, self.place == 5 or self.time > 11


class Memory:
    def __init__(self, capacity):
        self.rows = deque(maxlen=capacity)

    def sample(self, count):
        return random.sample(range(len(self.rows)), count)


class Replay(IterableDataset):
    def __init__(self, memory, count):
        self.memory, self.count = memory, count

    def __iter__(self):
        for i in self.memory.sample(self.count):
            e = self.memory.rows[i]
            yield e.state, e.action, torch.tensor(e.reward), e.done, e.next_state


env, memory = Corridor(), Memory(120)
q = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
target = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
target.load_state_dict(q.state_dict())
optimizer = torch.optim.SGD(q.parameters(), lr=0.1)
state, rewards = env.reset(), []


def play(epsilon):
    global state
    if random.random() < epsilon:
        action = random.randrange(2)
    else:
        with torch.no_grad():
            action = int(q(state[None]).argmax())
    after, reward, done = env.step(action)
    memory.rows.append(Experience(state, action, reward, done, after))
    state = env.reset() if done else after
    rewards.append(reward)


for _ in range(60):
    play(1.0)
loader = DataLoader(Replay(memory, 26), batch_size=8)
steps = 0
for episode in range(6):
    for states, actions, gains, dones, nexts in loader:
        play(max(0.1, 0.9 - 0.2 * episode))
        values = q(states).gather(1, actions[:, None]).squeeze(1)
        with torch.no_grad():
            future = target(nexts).max(1).values.masked_fill(dones, 0.0)
        loss = nn.functional.smooth_l1_loss(values, gains + 0.9 * future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps % 4 == 0:
            target.load_state_dict(q.state_dict())
save(q, steps, [sum(rewards)])
