"""Answer matching, accuracy, runs and plots; imports neither torch nor faiss."""

from gc_dpr.evaluation.accuracy import TopKAccuracy, top_k_accuracy
from gc_dpr.evaluation.answer_matching import AnswerMatcher, Token, has_answer, tokenize
from gc_dpr.evaluation.plots import plot_accuracy_over_k, plot_training_curve
from gc_dpr.evaluation.runs import (
    ResultEntry,
    RetrievedPassage,
    Run,
    read_dpr_json,
    read_trec,
    write_dpr_json,
    write_trec,
)
from gc_dpr.evaluation.tables import format_markdown_table, format_table

__all__ = [
    "AnswerMatcher",
    "ResultEntry",
    "RetrievedPassage",
    "Run",
    "Token",
    "TopKAccuracy",
    "format_markdown_table",
    "format_table",
    "has_answer",
    "plot_accuracy_over_k",
    "plot_training_curve",
    "read_dpr_json",
    "read_trec",
    "tokenize",
    "top_k_accuracy",
    "write_dpr_json",
    "write_trec",
]
