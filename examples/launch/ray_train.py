"""Run train.py as a Ray Train job: ``python ray_train.py --workers 4`` on the head of a Ray cluster.

Ray places the workers and creates the process group; ``poseidon.init()`` in train.py finds both and joins.
"""

import argparse
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("train.py")


def work(config):
    """Run one worker."""
    sys.argv = [str(SCRIPT), *config["arguments"]]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def main():
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--gpu", action="store_true", help="one GPU for each worker")
    arguments, rest = parser.parse_known_args()
    scaling = ScalingConfig(num_workers=arguments.workers, use_gpu=arguments.gpu)
    TorchTrainer(work, train_loop_config={"arguments": rest}, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
