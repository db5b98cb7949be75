"""Run train.py as a stage of a Spark job: ``spark-submit spark.py``; Spark starts torchrun on every executor."""

import sys
from pathlib import Path

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

SCRIPT = Path(__file__).resolve().with_name("train.py")

if __name__ == "__main__":
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    session = SparkSession.builder.appName("poseidon").getOrCreate()
    TorchDistributor(num_processes=workers, local_mode=False, use_gpu=False).run(str(SCRIPT), "--steps", "20")
    session.stop()
