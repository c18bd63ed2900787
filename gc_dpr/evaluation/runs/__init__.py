"""Runs: which passages were retrieved for which question; as TREC runs and DPR result files."""

from gc_dpr.evaluation.runs.dpr_json import read_dpr_json, write_dpr_json
from gc_dpr.evaluation.runs.records import ResultEntry, RetrievedPassage, Run
from gc_dpr.evaluation.runs.trec import read_trec, write_trec

__all__ = [
    "ResultEntry",
    "RetrievedPassage",
    "Run",
    "read_dpr_json",
    "read_trec",
    "write_dpr_json",
    "write_trec",
]
