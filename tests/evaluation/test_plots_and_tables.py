import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest

from gc_dpr.evaluation import (
    format_markdown_table,
    format_table,
    plot_accuracy_over_k,
    plot_training_curve,
)


def read_png(path):
    """Width and height, after checking that the file is a whole PNG."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    position, kinds, size = 8, [], None
    while position < len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        crc = struct.unpack(">I", data[position + 8 + length : position + 12 + length])[0]
        assert zlib.crc32(kind + body) == crc
        size = struct.unpack(">II", body[:8]) if kind == b"IHDR" else size
        kinds.append(kind)
        position += 12 + length
    assert kinds[-1] == b"IEND"
    return size


@pytest.mark.parametrize("depth", [1, 3, 100, 1000])
def test_accuracy_plot(tmp_path, depth):
    curves = {
        "BM25": np.linspace(0.2, 0.9, depth),
        "dense": np.linspace(0.5, 0.9, depth).tolist(),
        "other": [0.4],
    }
    path = plot_accuracy_over_k(curves, tmp_path / "a.png", title="T", subtitle="S")
    width, height = read_png(path)
    assert width > height > 500
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("steps", [1, 12, 300])
@pytest.mark.parametrize("panels", [1, 3])
def test_training_plot(tmp_path, steps, panels):
    values = np.linspace(1, 0, steps).tolist()
    extra = {"accuracy": values, "learning_rate": values} if panels == 3 else {}
    path = plot_training_curve(range(1, steps + 1), values, tmp_path / "t.png", **extra)
    assert read_png(path)[0] > 500


def test_svg_by_name(tmp_path):
    path = plot_accuracy_over_k({"x": [0.5, 1]}, tmp_path / "a.svg", title="<T>")
    assert "<svg" in path.read_text()


def test_plots_refuse_what_they_cannot_show(tmp_path):
    path = tmp_path / "a.png"
    for nothing in ({}, {"x": []}):
        with pytest.raises(ValueError, match="empty"):
            plot_accuracy_over_k(nothing, path, title="")
    for value in (93.1, -1, float("nan")):
        with pytest.raises(ValueError, match="within 0 and 1"):
            plot_accuracy_over_k({"x": [value]}, path, title="")
    with pytest.raises(ValueError, match="accuracy has 1 values for 2 steps"):
        plot_training_curve([1, 2], [1, 2], path, accuracy=[0.5])
    with pytest.raises(ValueError, match="loss has 0 values for 0 steps"):
        plot_training_curve([], [], path)
    assert not path.exists()


def test_importing_evaluation_is_light_and_drawing_leaves_no_global_state(tmp_path):
    code = (
        "import sys, gc_dpr.evaluation as e\n"
        "heavy = {'torch', 'faiss', 'matplotlib', 'bm25s', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        f"e.plot_accuracy_over_k({{'x': [0.5, 1.0]}}, r'{tmp_path / 'a.png'}', title='t')\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_table_aligns_numbers_right_and_words_left():
    table = format_table([["BM25", 9.5, "1,574"], ["東京", "10.25", "-"]], ["run", "top 1", "n"])
    assert table.split("\n") == [
        "run   top 1      n",
        "----  -----  -----",
        "BM25    9.5  1,574",
        "東京  10.25      -",
    ]


def test_table_without_rows_and_with_line_breaks():
    assert format_table([], ["a", "bc"]) == "a  bc\n-  --"
    assert format_table([["x\ny", ""]], ["a", "b"]).split("\n")[2].rstrip() == "x y"


def test_markdown_table_escapes_bars():
    assert format_markdown_table([["a|b", 1]], ["x|", "n"]) == (
        "| x\\| | n |\n| --- | ---: |\n| a\\|b | 1 |"
    )


@pytest.mark.parametrize("layout", [format_table, format_markdown_table])
def test_a_row_of_another_length_is_refused(layout):
    with pytest.raises(ValueError, match=r"rows\[1\] has 1 cells for 2 headers"):
        layout([["a", "b"], ["c"]], ["x", "y"])
