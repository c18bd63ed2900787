"""One finished chain of commands that the tests of wrong input take pieces of."""

import pytest
from pipeline_run import run_pipeline
from tiny_data import write_world


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Paths of a small data set by setting."""
    return write_world(tmp_path_factory.mktemp("cli_world"))


@pytest.fixture(scope="session")
def chain(tmp_path_factory, tiny_encoder_dir, world):
    """Model, embeddings, index and run of an untrained encoder."""
    folder = tmp_path_factory.mktemp("cli_chain")
    return run_pipeline(folder, tiny_encoder_dir, world, "train.epochs=0")
