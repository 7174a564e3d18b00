"""The page of a run, also in a real browser where there is one."""

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from mgpu_tf import cli
from mgpu_tf.reports import charts, page
from mgpu_tf.reports.report import EpochReport, Report

REPORT = Report(
    strategy="multi_worker_mirrored",
    num_workers=2,
    num_replicas=4,
    global_batch_size=64,
    global_step=46,
    examples_seen=2874,
    epochs=[
        EpochReport(
            n, 2.0 / n, {"accuracy": n / 4, "val_loss": 2.5 / n}, 2, 700
        )
        for n in (1, 2, 3)
    ],
    test={"loss": 0.43219},
    weights_sha256="ab" * 32,
    restarts=2,
    lost_steps=7,
    goodput={
        "wall_seconds": 50.0,
        **{f"{name}_seconds": 6.25 for name in page._TIMES},
    },
    devices=[["GPU:0", "GPU:1"]] * 2,
    mesh={"data": 2, "fsdp": 2, "tensor": 1, "pipeline": 1},
    memory=[
        {"device": "GPU:0", "weights": 1 << 20, "optimizer": 0, "other": 0}
    ],
    step_times=[
        {
            "epoch": 1,
            "workers": [{"input": 0.001, "compute": 0.02, "step": 0.03}, None],
        }
    ],
    left_out=[{"epoch": 2, "batch": 3, "step": 26, "loss": "nan"}],
    events=[
        {"at": 0.0, "what": "began", "step": 0, "why": "nothing to go on"},
        {"at": 20.5, "what": "saved", "step": 23, "why": "every 23 steps"},
        {"at": 36.0, "what": "resumed", "step": 23, "why": "the newest"},
    ],
    warnings=["a <b> & c"],
    configuration={"model": "cnn", "epochs": 3},
    predicted={
        "memory_bytes": {"predicted": 3 << 20, "measured": 2 << 20},
        "step_seconds": {"predicted": 0.0125, "measured": None},
    },
)


class Balanced(HTMLParser):
    """Fails on a tag that is not closed, or is closed by another."""

    ALONE = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.ALONE:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def text_of(html):
    parser = Balanced()
    parser.feed(html)
    assert parser.open == []
    return " ".join(parser.text)


@pytest.fixture
def folders(tmp_path):
    found = []
    for name, model in (("one", "cnn"), ("two", "mlp")):
        folder = tmp_path / name
        folder.mkdir()
        configuration = {"model": model, "epochs": 3}
        dataclasses.replace(REPORT, configuration=configuration).write(
            str(folder)
        )
        found.append(str(folder))
    return found


def test_one_run(folders):
    with open(page.write(folders[0])) as file:
        html = file.read()
    text = text_of(html)
    for words in (
        "Mesh: data 2, fsdp 2.",
        "Restarts: 2. Steps done again: 7.",
        "Epoch 2, batch 3: left out, since its loss was nan.",
        "Warning: a <b> & c",
        "lost work, and pauses after failures",
        "step 23: every 23 steps",
        "seconds since the run began",
        "12.5 ms",
        "mgpu-tf train --config=report.json",
        "val loss",
    ):
        assert words in text
    # The file needs no other.
    assert not re.search(r'(src|href)="|url\(|@import', html)


def test_two_runs_side_by_side(folders, tmp_path, capsys):
    path = str(tmp_path / "both.html")
    assert cli.main(["report", *folders, f"--output={path}"]) == 0
    with open(path) as file:
        html = file.read()
    text = text_of(html)
    assert "one: loss" in text
    assert "two: loss" in text
    [differs] = re.findall(r'<tr class="differs">(.*?)</tr>', html)
    assert differs == "<td>model</td><td>cnn</td><td>mlp</td>"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report"], "Write mgpu-tf report runs/a"),
        (["report", "/nowhere"], "'/nowhere' (FileNotFoundError)"),
    ],
)
def test_refused(arguments, words, capsys):
    assert cli.main(arguments) == 2
    assert words in capsys.readouterr().err


def test_two_runs_of_which_one_has_more():
    bare = Report("one_device", 1, 1, 8, 0, 0, [], {}, "")
    text = text_of(page.page([page.Run("a", REPORT), page.Run("b", bare)]))
    assert "b: Time line Not measured." in " ".join(text.split())


@pytest.mark.parametrize(
    ("last", "unit", "end"), [(1.0, "seconds", "1"), (90061.0, "hours", "30")]
)
def test_a_time_line_has_units_that_people_read(last, unit, end):
    drawn = charts.timeline(
        {"saved": [(0.0, "a"), (last, "b <c>")], "none": []}
    )
    assert f"{unit} since the run began" in drawn
    assert f">{end}</text>" in drawn
    assert drawn.count("<circle") == 2
    assert "b &lt;c&gt;" in drawn


def test_an_empty_run():
    bare = Report("one_device", 1, 1, 8, 0, 0, [], {}, "")
    text_of(page.page([page.Run("a", bare)]))


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 10.0], ["0", "5", "10"]),
        ([1.0, 1.0], ["0.5", "1", "1.5"]),
        ([float("nan"), 3.0, None, 4.0], ["3", "3.5", "4"]),
    ],
)
def test_axes_have_round_numbers(values, ticks):
    drawn = charts.lines({"a": values}, "epoch")
    found = re.findall(r'text-anchor="end"[^>]*>([^<]+)<', drawn)
    assert set(ticks) <= set(found)
    assert "nan" not in drawn


def test_no_number_at_all():
    assert "No values" in charts.lines({"a": [float("inf")]}, "epoch")


@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.full
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_shows_it(width, folders, tmp_path):
    """Nothing is wider than the window, and all charts have a size."""
    path = page.write(*folders, path=str(tmp_path / "both.html"))
    probe = (
        "<script>document.title=JSON.stringify({"
        "page:document.documentElement.scrollWidth,"
        "charts:[...document.querySelectorAll('svg')].map(s=>"
        "s.getBoundingClientRect().height)})</script>"
    )
    with open(path) as file:
        html = file.read().replace("</body>", f"{probe}</body>")
    with open(path, "w") as file:
        file.write(html)
    done = subprocess.run(
        [
            *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
            *(f"--window-size={max(width, 500)},900", "--dump-dom"),
            f"file://{path}",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    told = json.loads(re.search(r"<title>(.*?)</title>", done.stdout)[1])
    assert told["page"] <= max(width, 500)
    assert len(told["charts"]) >= 11
    assert min(told["charts"]) > 30
