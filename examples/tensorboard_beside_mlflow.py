"""TensorBoard beside MLflow: Lightning's loggers get the metrics of every evaluation, with step = updates.

python examples/tensorboard_beside_mlflow.py && tensorboard --logdir logs
persafl run "loggers=[tensorboard]"
"""

import sys

from lightning.pytorch.loggers import TensorBoardLogger

import persafl_lit

if __name__ == "__main__":
    settings = ["method=persafl_me", "clients=10", "horizon=20", "tracking.experiment=boards", *sys.argv[1:]]
    logger = TensorBoardLogger("logs", name="persafl_me")
    result = persafl_lit.run(settings, loggers=[logger])
    print(f"{len(result.points)} evaluations in {logger.log_dir} and in the MLflow run {result.run_id}")
