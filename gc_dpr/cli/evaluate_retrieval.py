"""gc-dpr evaluate_retrieval: one or several runs → top-k accuracy, table and plot."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gc_dpr.artifacts import atomic_file, read_json, write_json
from gc_dpr.cli.console import say, say_read, say_read_all, say_wrote
from gc_dpr.cli.output import claim_output
from gc_dpr.config import EvaluateRetrievalConfig
from gc_dpr.data import Question, passages_by_id, read_questions
from gc_dpr.data.readers import kinds
from gc_dpr.data.readers.paths import expand_paths
from gc_dpr.errors import ConfigError, DataError
from gc_dpr.evaluation import (
    TopKAccuracy,
    format_markdown_table,
    format_table,
    plot_accuracy_over_k,
    read_dpr_json,
    read_trec,
    top_k_accuracy,
)

FILES = ("metrics.json", "accuracy_over_k.png", "table.txt", "table.md", "per_question.json")

_TREC_LINE = re.compile(rb"\s*\S+\s+\S+\s+\S+\s+\d+\s+[-+.\deE]+\s+\S+\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """A run with everything that matching answers needs, in the order of the questions."""

    questions: list[Question]
    titles: list[list[str | None]]
    texts: list[list[str | None]]
    pool_size: int | None


def run(settings: EvaluateRetrievalConfig) -> None:
    """Match answers in every run, then show them side by side."""
    data = settings.data
    inputs = [settings.runs, data.questions_file, data.passages_file]
    folder = claim_output(settings, owned=FILES, inputs=inputs)
    results: dict[str, TopKAccuracy] = {}
    question_ids: dict[str, list[str]] = {}
    for name, path in named_runs(settings.runs).items():
        loaded = load_run(Path(path), settings)
        say_read(path, f"{name}: {len(loaded.questions)} questions")
        if not any(question.answers for question in loaded.questions):
            raise DataError(
                "no question of this run has an answer: there is nothing to measure. Retrieve with "
                "a questions file that has answers",
                path=path,
            )
        results[name] = measure(loaded, settings)
        question_ids[name] = [question.id for question in loaded.questions]
    refuse_different_questions(question_ids)
    write_results(results, question_ids, settings, folder.clear())


def named_runs(runs: Any) -> dict[str, str]:
    """Give every run file a name.

    Raises:
        ConfigError: Neither a path, nor a list of paths, nor names with paths; or a name twice.
    """
    if isinstance(runs, dict):
        named = {str(name): path for name, path in runs.items()}
    else:
        paths = runs if isinstance(runs, list) else [runs]
        named = {run_name(path, [p for p in paths if isinstance(p, str)]): path for path in paths}
        if len(named) < len(paths):
            raise ConfigError("runs names a file twice; name them: 'runs={a: …, b: …}'")
    if not named or not all(isinstance(path, str) and path for path in named.values()):
        raise ConfigError(
            f"runs={runs!r}: expected a run file, a list of them, or 'runs={{BM25: a.json, …}}'"
        )
    return named


def run_name(path: Any, paths: list[str]) -> str:
    """A short name: the file's, or with several of the same name the folder's too."""
    stems = [Path(p).stem for p in paths]
    stem = Path(str(path)).stem
    return stem if stems.count(stem) < 2 else f"{Path(str(path)).parent.name}/{stem}"


def load_run(path: Path, settings: EvaluateRetrievalConfig) -> LoadedRun:
    """Read a DPR JSON or a TREC run, whichever it is."""
    expected = "a run that gc-dpr retrieve wrote (run.json or run.trec)"
    if not path.is_file():
        found = "a folder" if path.is_dir() else "no such file"
        inside = path / "run.json"
        advice = f"; did you mean {inside}?" if inside.is_file() else ""
        raise DataError(f"{found}, expected {expected}{advice}", path=path)
    with path.open("rb") as handle:
        head = handle.read(1 << 18)  # a question may have thousands of answers before its ctxs
    kinds.refuse_binary(path, head)
    accepted = frozenset({kinds.RETRIEVAL_RESULTS, kinds.OTHER_JSON, kinds.UNKNOWN})
    if _TREC_LINE.match(head):
        return load_trec(path, settings)
    kinds.check_kind(path, head, expected=expected, accepted=accepted)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"[", b"{"):
        return load_dpr_json(path)
    return load_trec(path, settings)


def load_dpr_json(path: Path) -> LoadedRun:
    """Questions, answers and texts are all in the file."""
    entries = read_dpr_json(path)
    if not entries:
        raise DataError("the run holds no question", path=path)
    return LoadedRun(
        questions=[entry.question for entry in entries],
        titles=[[found.passage.title for found in entry.passages] for entry in entries],
        texts=[[found.passage.text for found in entry.passages] for entry in entries],
        pool_size=pool_size_beside(path),
    )


def load_trec(path: Path, settings: EvaluateRetrievalConfig) -> LoadedRun:
    """Join a TREC run with its questions and passages.

    Raises:
        ConfigError: data.questions_file or data.passages_file is not given.
        DataError: The run and the questions have nothing in common.
    """
    data = settings.data
    if data.questions_file is None or data.passages_file is None:
        raise ConfigError(
            f"{path} is a TREC run, which holds no texts: set data.questions_file and "
            "data.passages_file (or data=…), or give the run.json beside it"
        )
    found = read_trec(path)
    questions = list(read_questions(data.questions_file))
    known = {question.id for question in questions}
    unknown = [question_id for question_id in found if question_id not in known]
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(found)} question ids of the run, such as {unknown[0]!r}, are "
            f"not in {data.questions_file}; they must belong together",
            path=path,
        )
    missing = len(questions) - len(found)
    if missing:
        say(f"note   {missing} of {len(questions)} questions are not in {path}: counted as misses")
    passages = passages_by_id(
        data.passages_file,
        {passage_id for ranking in found.values() for passage_id, _ in ranking},
        quoting=data.passages_quoting,  # type: ignore[arg-type]
    )
    say_read_all(expand_paths(data.questions_file), f"{len(questions)} questions")
    say_read_all(expand_paths(data.passages_file), f"{len(passages)} passages looked up")
    rankings = [[passages[i] for i, _ in found.get(question.id, [])] for question in questions]
    return LoadedRun(
        questions=questions,
        titles=[[passage.title for passage in ranking] for ranking in rankings],
        texts=[[passage.text for passage in ranking] for ranking in rankings],
        pool_size=pool_size_beside(path),
    )


def pool_size_beside(path: Path) -> int | None:
    """How many passages were searched, when retrieve's metrics.json lies beside the run."""
    beside = path.parent / "metrics.json"
    if not beside.is_file():
        return None
    metrics = read_json(beside, what="the metrics.json of gc-dpr retrieve")
    size = metrics.get("pool_size") if isinstance(metrics, dict) else None
    return size if isinstance(size, int) else None


def measure(loaded: LoadedRun, settings: EvaluateRetrievalConfig) -> TopKAccuracy:
    """Top-k accuracy of one run."""
    return top_k_accuracy(
        [question.answers for question in loaded.questions],
        loaded.texts,
        match=settings.data.answer_match,
        ks=settings.top_ks,
        titles=loaded.titles if settings.use_title else None,
        empty_answers=settings.empty_answers,
        pool_size=loaded.pool_size,
        workers=settings.workers,
        progress=True,
    )


def refuse_different_questions(question_ids: dict[str, list[str]]) -> None:
    """Side by side only makes sense for the same questions."""
    names = list(question_ids)
    for name in names[1:]:
        if question_ids[name] != question_ids[names[0]]:
            raise DataError(
                f"the runs {names[0]!r} and {name!r} are about different questions "
                f"({len(question_ids[names[0]])} and {len(question_ids[name])}); evaluate them "
                "one by one"
            )


def write_results(
    results: dict[str, TopKAccuracy],
    question_ids: dict[str, list[str]],
    settings: EvaluateRetrievalConfig,
    output: Path,
) -> None:
    """Table, plot and details first; metrics.json last."""
    headers = ["", *(f"top-{k}" for k in settings.top_ks)]
    rows = [
        [name, *(f"{100 * result.at(k):.1f}" for k in settings.top_ks)]
        for name, result in results.items()
    ]
    caption = describe_numbers(results)
    table = f"{format_table(rows, headers)}\n{caption}"
    say(f"\n{table}\n")
    for suffix, text in (
        ("txt", table),
        ("md", f"{format_markdown_table(rows, headers)}\n\n{caption}"),
    ):
        with atomic_file(output / f"table.{suffix}") as handle:
            handle.write(text + "\n")
    say_wrote(
        plot_accuracy_over_k(
            {name: result.accuracy.tolist() for name, result in results.items()},
            output / "accuracy_over_k.png",
            title="Top-k retrieval accuracy",
            subtitle=caption,
        )
    )
    write_json(
        output / "per_question.json",
        {
            name: {
                question_id: (flags.index(True) + 1 if True in flags else None)
                for question_id, flags in zip(question_ids[name], result.per_question, strict=True)
            }
            for name, result in results.items()
        },
    )
    say_wrote(output / "per_question.json", "rank of the first passage with an answer")
    metrics = {
        name: {**result.metrics(settings.top_ks), **result.description()}
        for name, result in results.items()
    }
    say_wrote(write_json(output / "metrics.json", metrics))


def describe_numbers(results: dict[str, TopKAccuracy]) -> str:
    """What the numbers are shares of, and how answers were matched."""
    first = next(iter(results.values()))
    pools = {result.pool_size for result in results.values()}
    pool = pools.pop() if len(pools) == 1 else None
    searched = f", of {pool} passages" if pool is not None else ""
    titles = " in title and text" if first.title_searched else ""
    return f"% of {first.questions} questions{searched}; answer match: {first.match}{titles}"
