"""Pipeline execution: stages, split backward, messages, and the gradient guard."""

from elche.pipeline.pipeline import Pipeline as Pipeline
from elche.pipeline.pipeline_config import PipelineConfig as PipelineConfig
from elche.pipeline.stage import OwnBackward as OwnBackward
