"""A worker of an elastic job whose data an eavesdropper looks for: one is killed, and its successor gets the state.

``eavesdropped_elastic.py FOLDER``: writes what it had after every step to FOLDER/elastic-KIND-NUMBER.npy.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import poseidon
from poseidon.job.secret import find_secret

DIES_AFTER, GOES_ON = 6, 5
PACE_S = 0.05
"""For a step, so that a survivor does not take thousands of them while its new companion starts."""


def main(folder):
    Path(folder, "secret").write_bytes(find_secret())
    killed, joined = Path(folder, "killed"), Path(folder, "joined")
    poseidon.init()
    number = os.getpid()
    torch.manual_seed(number)
    inner = nn.Sequential(nn.Linear(48, 300), nn.Tanh(), nn.Linear(300, 40))
    adam = torch.optim.Adam(inner.parameters(), 0.01)
    model, optimizer = poseidon.distribute(inner, adam)
    noted = {"weights": [], "moments": []}

    def note():
        for parameter in inner.parameters():
            noted["weights"].append(parameter.detach().numpy().copy().reshape(-1))
            if parameter in adam.state:
                noted["moments"].append(adam.state[parameter]["exp_avg"].numpy().copy().reshape(-1))

    def save():
        for kind, values in noted.items():
            np.save(Path(folder, f"elastic-{kind}-{number}.npy"), np.concatenate(values))

    def train(step):
        note()
        if checkpoint.handed is not None and killed.exists():
            joined.write_text(str(step))
        try:
            # Who has joined writes it down before its first step, and nobody takes that step without it.
            while not joined.exists() or step < int(joined.read_text()) + GOES_ON:
                inputs = torch.randn(8, 48)
                optimizer.zero_grad()
                (model(inputs) - inputs[:, :40]).square().mean().backward()
                optimizer.step()
                note()
                step += 1
                checkpoint.step(step)
                if step == DIES_AFTER and os.uname().nodename == "machine1" and not killed.exists():
                    save()
                    killed.touch()
                    os.kill(number, signal.SIGKILL)
                time.sleep(PACE_S)
        finally:
            save()

    with poseidon.Checkpoint(None, model=model, optimizer=optimizer) as checkpoint:
        checkpoint.run(train)


if __name__ == "__main__":
    main(*sys.argv[1:])
