"""One file per format; each turns files into an iterator of plain records."""

from gc_dpr.data.readers.passages_tsv import read_passages
from gc_dpr.data.readers.questions_csv import read_questions
from gc_dpr.data.readers.training_formats import read_training_examples

__all__ = ["read_passages", "read_questions", "read_training_examples"]
