# The example for Spark, on two slots of this machine.
import os
import runpy
import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession

os.environ["PYSPARK_PYTHON"] = sys.executable
settings = {"spark.ui.enabled": "false", "spark.driver.bindAddress": "127.0.0.1"}
SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
sys.argv = ["spark.py", "2"]
os.chdir(tempfile.mkdtemp())  # for the checkpoints
runpy.run_path(str(Path(__file__).parents[2] / "examples" / "launch" / "spark.py"), run_name="__main__")
print("spark: the example ran to its end")
