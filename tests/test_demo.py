"""scripts/demo.py: what is finished is skipped, what has changed is repeated with what follows."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def demo_module(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.commands = []

    def run(title, *arguments):
        module.commands.append(arguments)
        folder = next(a for a in arguments if a.startswith("output_dir=")).partition("=")[2]
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "run", run)
    return module


def chain(module, epochs="train.epochs=1"):
    """One call of the demo, shortened; returns the commands that ran."""
    module.commands.clear()
    demo = module.Demo(module.ROOT / "runs" / "demo")
    model = demo.stage("model", "train_dense_encoder", epochs)
    demo.stage("embeddings", "generate_embeddings", f"checkpoint={model}", after=("model",))
    demo.stage("bm25", "retrieve", "method=bm25")
    return [arguments[0] for arguments in module.commands]


def test_a_second_call_skips_what_is_finished(demo_module):
    everything = ["train_dense_encoder", "generate_embeddings", "retrieve"]
    assert chain(demo_module) == everything
    assert chain(demo_module) == []


def test_other_settings_repeat_a_stage_and_what_reads_from_it(demo_module):
    chain(demo_module)
    again = ["train_dense_encoder", "generate_embeddings"]
    assert chain(demo_module, epochs="train.epochs=2") == again


def test_a_stage_that_failed_or_lost_its_folder_is_repeated(demo_module, monkeypatch):
    def fail(title, *arguments):
        raise SystemExit(1)

    working = demo_module.run
    monkeypatch.setattr(demo_module, "run", fail)
    with pytest.raises(SystemExit):
        chain(demo_module)
    monkeypatch.setattr(demo_module, "run", working)
    assert chain(demo_module)[0] == "train_dense_encoder"
    (demo_module.ROOT / "runs" / "demo" / "bm25").rmdir()
    assert chain(demo_module) == ["retrieve"]


def test_a_stage_killed_after_the_one_it_reads_from_is_repeated(demo_module, monkeypatch):
    """Otherwise the new model would be searched with the old model's embeddings."""
    chain(demo_module)
    working = demo_module.run

    def fail_at_embeddings(title, *arguments):
        if arguments[0] == "generate_embeddings":
            raise SystemExit(137)
        working(title, *arguments)

    monkeypatch.setattr(demo_module, "run", fail_at_embeddings)
    with pytest.raises(SystemExit):
        chain(demo_module, epochs="train.epochs=2")
    monkeypatch.setattr(demo_module, "run", working)
    assert chain(demo_module, epochs="train.epochs=2") == ["generate_embeddings"]


def test_an_unknown_data_set_is_refused(demo_module, monkeypatch):
    monkeypatch.setattr("sys.argv", ["demo.py", "data=nq"])
    with pytest.raises(SystemExit, match="expected one of factbook, squad_sample"):
        demo_module.main()
