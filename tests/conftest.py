"""What all tests share: one thread a process, no hub, and a tiny encoder built in place."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tiny_encoder import save_tiny_bert

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_encoder_dir(tmp_path_factory):
    """Folder of a random BERT (2 layers, 32 dims) with a fast WordPiece tokenizer."""
    return save_tiny_bert(tmp_path_factory.mktemp("tiny_bert"))
