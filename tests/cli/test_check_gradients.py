"""gc-dpr check_gradients: a table and status 0 when all agree, one clear line and 1 when not."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from commands import run_command, succeed
from pipeline_run import TRAINING, file_settings
from torch import nn

from gc_dpr.cli import check_gradients as command
from gc_dpr.cli.train_dense_encoder import start_model
from gc_dpr.config import CheckGradientsConfig, TrainDenseEncoderConfig
from gc_dpr.training.batch_step import batch_gradients
from gc_dpr.training.gradient_check import batch_check

pytestmark = pytest.mark.pipeline
PATH = "passage_encoder.transformer.encoder.layer.0.output.LayerNorm"


@pytest.fixture
def arguments(tiny_encoder_dir, world, tmp_path):
    """A check that works: of the settings of a training run."""
    return [
        "check_gradients", f"model.name_or_path={tiny_encoder_dir}",
        *file_settings(world, "train_file"), *TRAINING, "model.dropout=0.2",
        f"output_dir={tmp_path / 'output'}",
    ]  # fmt: skip


def metrics(tmp_path):
    return json.loads((tmp_path / "output" / "metrics.json").read_text())


def test_a_normal_model_passes_with_a_table(arguments, tmp_path, world):
    outcome = succeed(*arguments, "questions=8")
    assert f"read   {world['train_file']}  (12 questions)" in outcome.out
    assert "the first 8 questions and" in outcome.out
    assert "chunks: question 4, passage" in outcome.out
    assert "smaller" not in outcome.out
    assert "exact: float64, without dropout, against the batch in one piece; loss" in outcome.out
    assert "as trained: fp32, dropout as configured" in outcome.out
    rows = [line.split() for line in outcome.out.splitlines() if line.endswith("  ok")]
    assert [row[:-5] + row[-5:-4] for row in rows] == [
        ["exact", "question"], ["exact", "passage"],
        ["as", "trained", "question"], ["as", "trained", "passage"],
    ]  # fmt: skip
    assert all(float(row[-4]) <= float(row[-2]) for row in rows)
    assert "NOT EQUAL" not in outcome.out
    found = metrics(tmp_path)
    assert (found["passed"], found["questions"], found["findings"]) == (True, 8, [])
    assert found["exact"]["dtype"] == "float64"
    assert found["exact"]["tolerance"] == 1e-12
    for comparison, limit in (("exact", 1e-12), ("as_trained", 1e-4)):
        for tower in ("question", "passage"):
            assert found[comparison]["towers"][tower]["largest_relative_difference"] < limit
    assert [entry.name for entry in (tmp_path / "output").iterdir()] == ["metrics.json"]


def test_it_is_the_first_batch_of_training(arguments, tmp_path, world):
    """Without dropout, the loss of the first step of a training run."""
    settings = ["model.dropout=0", "train.batch_size=6", "train.negative_choice=random"]
    kept = [text for text in arguments if not text.startswith(("model.dropout", "output_dir"))]
    output = tmp_path / "training"
    succeed(
        "train_dense_encoder", *kept[1:], *settings, "train.max_steps=1", f"output_dir={output}"
    )
    first = json.loads((output / "training_log.jsonl").read_text().splitlines()[0])
    succeed(*kept, *settings, f"output_dir={tmp_path / 'output'}")
    found = metrics(tmp_path)
    assert found["questions"] == first["questions"] == 6
    assert found["candidates"] == first["candidates"]
    assert found["exact"]["undivided_loss"] == pytest.approx(first["loss"], rel=1e-5)


def test_a_single_chunk_is_divided_and_said(arguments, tmp_path):
    whole = [text for text in arguments if "chunk_rows" not in text]
    outcome = succeed(*whole, "model.shared=true", "hardware.precision=bf16")
    assert "smaller question and passage chunks than configured" in outcome.out
    found = metrics(tmp_path)
    assert found["chunks_made_smaller"] == ["question", "passage"]
    assert all(count > 1 for count in found["chunks"].values())
    assert list(found["exact"]["towers"]) == ["shared"]
    assert found["as_trained"]["dtype"] == "bfloat16"


def with_module(make):
    """Training would start from a model with another layer in it."""

    def changed(settings):
        model = start_model(settings)
        output = model.passage_encoder.transformer.encoder.layer[0].output
        output.LayerNorm = make(output.LayerNorm)
        return model

    return mock.patch.object(command, "start_model", changed)


class TokenNorm(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, hidden):
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


def test_batch_norm_fails_and_is_named(arguments, tmp_path):
    with with_module(TokenNorm):
        outcome = run_command(*arguments)
    assert outcome.status == 1
    assert "cached and undivided step differ in the gradient of the" in outcome.error
    assert f"The cause is most likely {PATH}.norm (BatchNorm1d): see the notes" in outcome.error
    assert f"note   {PATH}.norm (BatchNorm1d): each forward changes running_mean" in outcome.out
    assert "NOT EQUAL" in outcome.out
    found = metrics(tmp_path)
    assert not found["passed"]
    assert {finding["cause"] for finding in found["findings"]} == {"state", "rows"}
    assert found["findings"][0]["module"] == f"{PATH}.norm"


class Counter(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden):
        self.forwards += 1
        return self.layer(hidden)


def test_a_counter_is_noted_but_no_failure(arguments, tmp_path):
    with with_module(Counter):
        outcome = succeed(*arguments)
    assert f"note   {PATH} (Counter): each forward changes forwards" in outcome.out
    assert metrics(tmp_path)["passed"]


def test_a_wrong_step_fails_without_a_module_to_blame(arguments, tmp_path):
    def scaled(model, *positional, **options):
        outcome = batch_gradients(model, *positional, **options)
        for parameter in model.question_encoder.parameters():
            parameter.grad /= 8
        return outcome

    with mock.patch.object(batch_check, "batch_gradients", scaled):
        outcome = run_command(*arguments)
    assert outcome.status == 1
    assert "differ in the gradient of the question tower by 8.8e-01" in outcome.error
    assert "(exact; tolerance 1.0e-12)" in outcome.error
    assert f"please report it with {tmp_path / 'output' / 'metrics.json'}" in outcome.error
    assert outcome.out.count("NOT EQUAL") == 2


class Broken(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden):
        return self.layer(hidden) * math.nan


def test_what_is_not_finite_fails(arguments, tmp_path):
    with with_module(Broken):
        outcome = run_command(*arguments)
    assert outcome.status == 1
    assert "is not finite" in outcome.error
    assert metrics(tmp_path)["exact"]["undivided_loss"] is None


def test_out_of_memory_names_the_setting(arguments):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    with mock.patch.object(command, "check_gradients", side_effect=error):
        outcome = run_command(*arguments, "questions=300")
    assert outcome.status == 2
    assert "activations of 300 questions" in outcome.error
    assert "lower questions=" in outcome.error


@pytest.mark.parametrize(
    ("change", "status", "answer"),
    [
        ("questions=0", 2, "questions=0: expected 1 or more"),
        ("questions=many", 2, "So many questions of the first batch are compared"),
        ("question=3", 2, "did you mean questions?"),
        ("train.bacth_size=3", 2, "did you mean train.batch_size?"),
        ("data.train_file=/no/such.json", 1, "/no/such.json: file not found"),
        ("experiment=imagenet", 2, "no such preset; there are: factbook_cpu"),
    ],
)
def test_wrong_input_gets_one_line(change, status, answer, arguments, tmp_path):
    key = change.partition("=")[0]
    outcome = run_command(*[a for a in arguments if not a.startswith(key)], change)
    assert outcome.status == status
    assert answer in outcome.error


def test_one_question_without_negatives(arguments, tmp_path):
    kept = [text for text in arguments if not text.startswith("train.hard")]
    outcome = run_command(*kept, "questions=1", "train.hard_negatives=0")
    assert outcome.status == 1
    assert "one question without negatives" in outcome.error
    assert not (tmp_path / "output" / "metrics.json").exists()


def test_results_are_not_overwritten_by_accident(arguments, tmp_path):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "mine.txt").write_text("kept")
    outcome = run_command(*arguments)
    assert outcome.status == 2
    assert "is not empty" in outcome.error
    succeed(*arguments, "overwrite=true", "questions=3")
    assert sorted(e.name for e in (tmp_path / "output").iterdir()) == ["metrics.json", "mine.txt"]


def test_it_takes_what_training_takes(arguments):
    assert issubclass(CheckGradientsConfig, TrainDenseEncoderConfig)
    assert CheckGradientsConfig.REQUIRED == TrainDenseEncoderConfig.REQUIRED
    assert not CheckGradientsConfig.SEVERAL_PROCESSES
    shown = run_command("check_gradients", "experiment=nq_1x11gb", "--help")
    assert shown.status == 0
    assert "questions=32  [whole number]" in shown.out
    assert "experiment=factbook_cpu|" in shown.out
    assert "hardware.precision=fp16" in shown.out


def test_torchrun_is_refused(arguments):
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "2"}):
        outcome = run_command(*arguments)
    assert outcome.status == 2
    assert "check_gradients runs in one process" in outcome.err


def test_the_script_as_a_process(arguments, tmp_path):
    script = Path(__file__).parents[2] / "scripts" / "check_gradients.py"
    finished = subprocess.run(
        [sys.executable, script, *map(str, arguments[1:]), "questions=4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stdout.count("  ok\n") == 4
