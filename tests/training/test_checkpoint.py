import json

import numpy as np
import pytest
from tiny_data import passage
from training_parts import make_model

from gc_dpr.errors import ArtifactError
from gc_dpr.models import BiEncoder
from gc_dpr.training.checkpoint import save_checkpoint

STATE = {"steps": 3, "epochs": 1, "seed": 0, "model_fingerprint": "f"}


@pytest.fixture(params=[False, True], ids=["two towers", "shared"])
def model(request, tiny_encoder_dir):
    return make_model(tiny_encoder_dir, double=False, shared=request.param).eval()


def save(model, folder):
    return save_checkpoint(folder, model, settings_yaml="train: {}\n", trainer_state=STATE)


def test_a_checkpoint_loads_as_the_same_model(model, tmp_path):
    folder = save(model, tmp_path / "checkpoint")
    assert folder == tmp_path / "checkpoint"
    loaded = BiEncoder.from_pretrained(folder)
    assert loaded.fingerprint() == model.fingerprint()
    assert loaded.shared == model.shared
    passages = [passage(number)[1:][::-1] for number in range(3)]
    np.testing.assert_array_equal(loaded.encode_passages(passages), model.encode_passages(passages))
    np.testing.assert_array_equal(loaded.encode_questions(["a?"]), model.encode_questions(["a?"]))
    assert (folder / "config.yaml").read_text() == "train: {}\n"
    assert json.loads((folder / "trainer_state.json").read_text()) == STATE
    assert (folder / "passage_encoder").exists() is not model.shared


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, OSError])
def test_a_save_that_is_interrupted_leaves_nothing(model, tmp_path, monkeypatch, interruption):
    def stop_half_way(folder, **_):
        assert (folder.parent.parent / "checkpoint").exists() is False
        (folder / "model.safetensors").parent.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_text("half")
        raise interruption

    monkeypatch.setattr(model.question_encoder, "save_pretrained", stop_half_way)
    with pytest.raises(interruption):
        save(model, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_is_never_written_over(model, tmp_path):
    save(model, tmp_path / "checkpoint")
    with pytest.raises(ArtifactError, match="already exists"):
        save(model, tmp_path / "checkpoint")
