"""Reading data: files to plain records, a checked corpus, a training set.

Nothing imported here needs torch. What prepares batches does, and is imported by its own name:
``gc_dpr.data.sampling``, ``gc_dpr.data.sampler`` and ``gc_dpr.data.collator``.
"""

from gc_dpr.data.corpus import CorpusSummary, passages_by_id, scan_corpus
from gc_dpr.data.readers import read_passages, read_questions, read_training_examples
from gc_dpr.data.records import Passage, Question, TrainingExample
from gc_dpr.data.training_set import TrainingSet, load_training_set

__all__ = [
    "CorpusSummary",
    "Passage",
    "Question",
    "TrainingExample",
    "TrainingSet",
    "load_training_set",
    "passages_by_id",
    "read_passages",
    "read_questions",
    "read_training_examples",
    "scan_corpus",
]
