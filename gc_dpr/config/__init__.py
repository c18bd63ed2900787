"""The typed schema of every command: names, types, defaults and meanings of all settings.

One dataclass per command, in a file of its own, made of one dataclass per Hydra group. YAML files
under ``conf/`` carry values only. ``option(default, meaning)`` puts the sentence that ``--help``
shows beside the field. Checks that need more than a type live in each group's ``check``; they run
after composition.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore

from gc_dpr.config.build_index import BuildIndexConfig
from gc_dpr.config.check_gradients import CheckGradientsConfig
from gc_dpr.config.command import CommandConfig
from gc_dpr.config.evaluate_retrieval import EvaluateRetrievalConfig
from gc_dpr.config.generate_embeddings import GenerateEmbeddingsConfig
from gc_dpr.config.groups import (
    DataConfig,
    HardwareConfig,
    IndexConfig,
    ModelConfig,
    TrainConfig,
)
from gc_dpr.config.retrieve import RetrieveConfig
from gc_dpr.config.search import SearchConfig
from gc_dpr.config.train_dense_encoder import TrainDenseEncoderConfig

__all__ = [
    "COMMANDS",
    "BuildIndexConfig",
    "CheckGradientsConfig",
    "CommandConfig",
    "DataConfig",
    "EvaluateRetrievalConfig",
    "GenerateEmbeddingsConfig",
    "HardwareConfig",
    "IndexConfig",
    "ModelConfig",
    "RetrieveConfig",
    "SearchConfig",
    "TrainConfig",
    "TrainDenseEncoderConfig",
    "register",
]

COMMANDS: dict[str, type[CommandConfig]] = {
    "train_dense_encoder": TrainDenseEncoderConfig,
    "check_gradients": CheckGradientsConfig,
    "generate_embeddings": GenerateEmbeddingsConfig,
    "build_index": BuildIndexConfig,
    "retrieve": RetrieveConfig,
    "evaluate_retrieval": EvaluateRetrievalConfig,
    "search": SearchConfig,
}


def register() -> None:
    """Store every command's schema where its top YAML file names it: ``<command>_schema``."""
    store = ConfigStore.instance()
    for name, cls in COMMANDS.items():
        store.store(name=f"{name}_schema", node=cls)
