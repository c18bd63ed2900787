"""Settings of check_gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gc_dpr.config.fields import at_least, option
from gc_dpr.config.train_dense_encoder import TrainDenseEncoderConfig


@dataclass(kw_only=True, slots=True)
class CheckGradientsConfig(TrainDenseEncoderConfig):
    """Compare the cached step's gradients with the undivided batch's, with a run's own settings."""

    SEVERAL_PROCESSES: ClassVar[bool] = False

    questions: int = option(
        32,
        "So many questions of the first batch are compared; the activations of all of them and of "
        "their passages must fit into memory, in float64",
    )

    def check(self) -> None:
        """Refuse impossible values."""
        at_least("questions", self.questions, 1)
