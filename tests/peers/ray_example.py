# The example for Ray Train, on two workers of this machine. Ray shows what they print; an error of one ends it.
import os
import runpy
from pathlib import Path

import ray

ray.init(
    num_cpus=3,
    include_dashboard=False,
    _node_ip_address="127.0.0.1",
    runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "GLOO_SOCKET_IFNAME": "lo"}},
)
runpy.run_path(str(Path(__file__).parents[2] / "examples" / "trainers" / "ray_train.py"), run_name="__main__")
print("ray: the example ran to its end")
