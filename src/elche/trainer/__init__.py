"""The `Trainer`: its loop, evaluation, handle and result."""

from elche.trainer.handle import TrainingHandle as TrainingHandle
from elche.trainer.handle import TrainingPhase as TrainingPhase
from elche.trainer.trainer import Trainer as Trainer
from elche.trainer.trainer_config import EarlyStopping as EarlyStopping
from elche.trainer.trainer_config import TrainerConfig as TrainerConfig
from elche.trainer.trainer_result import EpochRecord as EpochRecord
from elche.trainer.trainer_result import RunReport as RunReport
from elche.trainer.trainer_result import TrainResult as TrainResult
