"""A small world of buildings: passages, training questions and test questions with answers."""

import json
from pathlib import Path

NAMES = ("clock", "salt", "river", "king", "moon", "stone")
KINDS = ("tower", "bridge", "works", "island")
BUILDINGS = [f"{name} {kind}" for name in NAMES for kind in KINDS]


def passage(number):
    """One building's (id, text, title)."""
    title = BUILDINGS[number]
    place = ("city", "country", "mountain", "lake", "capital")[number % 5]
    text = f'The {title}, an "old" place in the {place}, was built in {1801 + number}.'
    # lengths differ, so that chunks and padding do
    return f"p{number}", text + " People of the first ship wrote of it." * (number % 3), title


def context(number):
    """The same as DPR writes it inside a training example."""
    passage_id, text, title = passage(number)
    return {"title": title, "text": text, "passage_id": passage_id}


def training_example(number, *, negatives=1):
    """A question about one building; its hard negatives bear the same name."""
    others = [number - number % 4 + (number + step) % 4 for step in range(1, 4)]
    return {
        "question": f"when was the {BUILDINGS[number]} built",
        "answers": [str(1801 + number)],
        "positive_ctxs": [context(number)],
        "negative_ctxs": [context((number + 7) % len(BUILDINGS))],
        "hard_negative_ctxs": [context(other) for other in others[:negatives]],
    }


def write_world(folder):
    """Write passages.tsv, train.json and questions.csv; returns their paths by setting."""
    folder = Path(folder)
    quote = '"'
    rows = [passage(number) for number in range(len(BUILDINGS))]
    lines = ["id\ttext\ttitle"]
    lines += [f'{i}\t"{text.replace(quote, quote * 2)}"\t{title}' for i, text, title in rows]
    (folder / "passages.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    examples = [training_example(n, negatives=n % 3) for n in range(0, len(BUILDINGS), 2)]
    (folder / "train.json").write_text(json.dumps(examples), encoding="utf-8")
    questions = [f"{e['question']}\t{e['answers']!r}" for e in examples]
    # the answer of the last one is in no passage
    questions.append("who wrote the first book\t['a duck']")
    (folder / "questions.csv").write_text("\n".join(questions) + "\n", encoding="utf-8")
    return {
        "train_file": folder / "train.json",
        "passages_file": folder / "passages.tsv",
        "questions_file": folder / "questions.csv",
    }
