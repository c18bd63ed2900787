import json
import logging

from gc_dpr.training import loggers
from gc_dpr.training.loggers import StepLogger


def record(step):
    return {
        "step": step, "loss": 1.5, "in_batch_accuracy": 0.25, "candidates": 8,
        "questions_per_second": 10.0, "grad_norm": None,
    }  # fmt: skip


def test_every_record_is_a_line_that_can_be_read_at_once(tmp_path):
    path = tmp_path / "log.jsonl"
    with StepLogger(path, total_steps=2) as log:
        for step in (1, 2):
            log.log(record(step))
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert lines == [record(n) for n in range(1, step + 1)]


def test_without_a_terminal_the_first_and_the_last_step_are_said(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, logger="gc_dpr"),
        StepLogger(tmp_path / "log.jsonl", total_steps=5) as log,
    ):
        for step in range(1, 6):
            log.log(record(step))
    assert [line.split(":")[0] for line in caplog.messages] == ["step 1 of 5", "step 5 of 5"]
    assert "loss 1.5000, in-batch accuracy 25.0 % (8 candidates)" in caplog.messages[0]


def test_and_one_line_every_few_seconds(tmp_path, caplog, monkeypatch):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(loggers.time, "monotonic", lambda: next(clock))
    with (
        caplog.at_level(logging.INFO, logger="gc_dpr"),
        StepLogger(tmp_path / "log.jsonl", total_steps=9) as log,
    ):
        for step in range(1, 6):
            log.log(record(step))
    assert [line.split(" of")[0] for line in caplog.messages] == ["step 1", "step 3", "step 5"]
    assert "about" in caplog.messages[1]


def test_other_processes_write_nothing(tmp_path, caplog):
    with caplog.at_level(logging.INFO), StepLogger(None, total_steps=1) as log:
        log.log(record(1))
    assert caplog.messages == []
    assert list(tmp_path.iterdir()) == []
