"""Settings of train_dense_encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gc_dpr.config.command import CommandConfig
from gc_dpr.config.fields import group
from gc_dpr.config.groups import DataConfig, HardwareConfig, ModelConfig, TrainConfig


@dataclass(kw_only=True, slots=True)
class TrainDenseEncoderConfig(CommandConfig):
    """Train a question and a passage encoder with the gradient cache."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("output_dir", "model.name_or_path", "data.train_file")
    SEVERAL_PROCESSES: ClassVar[bool] = True

    model: ModelConfig = group(ModelConfig, "the encoders")
    data: DataConfig = group(DataConfig, "the data set")
    train: TrainConfig = group(TrainConfig, "objective and optimisation")
    hardware: HardwareConfig = group(HardwareConfig, "memory and speed")
