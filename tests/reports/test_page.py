"""The page of a run, also in a real browser where there is one."""

import dataclasses
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from mgpu_tf import cli
from mgpu_tf.mesh import Mesh
from mgpu_tf.reports import (
    charts,
    page,
    placement,
    step_times,
    tracks,
    wall_time,
)
from mgpu_tf.reports.distribution import Distribution
from mgpu_tf.reports.report import EpochReport, Report


def _distribution(worker):
    """Of ten steps, of which one takes ten times as long."""
    times = Distribution()
    times.note(0.01 * worker, steps=9)
    times.note(0.1 * worker, steps=1)
    return times.as_json()


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
        **{f"{name}_seconds": 6.25 for name in wall_time.PARTS},
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
    distributions=[{"step": _distribution(n), "compute": None} for n in (1, 2)],
    time_line={
        "width": 8.0,
        "bins": [
            {"start": 8.0},
            *[{"compile": 4.0, "step": 4.0}] * 2,
            {"restart": 8.0},
            {"step": 3.0, "input": 1.0},
        ],
        "faults": [{"at": 26.0, "text": "loss nan in step 26"}],
    },
    tasks=[
        {"task": "worker 0", "role": "trains, writes the files"},
        {"task": "worker 1", "role": "trains"},
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
        "worker 0 trains, writes the files",
        "0 to 8 s: start 100%",
        "8 to 16 s: step 50%, compile 50%",
        "Restarts: 2. Steps done again: 7.",
        "Epoch 2, batch 3: left out, since its loss was nan.",
        "Warning: a <b> & c",
        "lost work, and pauses after failures",
        "seconds since the run began",
        "12.5 ms",
        "mgpu-tf train --config=report.json",
        "val loss",
    ):
        assert words in " ".join(text.split())
    assert 'title="step 23: every 23 steps"' in html
    assert 'title="loss nan in step 26"' in html
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
    assert "b: Where the time went Not measured." in " ".join(text.split())


def drawn(workers, devices, **values):
    names = [f"GPU:{n}" for n in range(devices)]
    report = dataclasses.replace(REPORT, tasks=[], **values)
    report = dataclasses.replace(
        report, num_workers=workers, devices=[names] * workers
    )
    return placement.draw(report)


def test_each_device_has_its_place_on_the_mesh():
    mesh = Mesh(data=2, fsdp=2, tensor=2)
    html = drawn(2, 4, mesh=dataclasses.asdict(mesh))
    tiles = re.findall(r'class="device">(\S+?)<span>(.*?)<', html)
    assert len(tiles) == mesh.size
    for place, (name, where) in enumerate(tiles):
        fsdp, tensor = mesh.rank("fsdp", place), mesh.rank("tensor", place)
        assert name == f"GPU:{place % 4}"
        assert where == f"fsdp {fsdp} · tensor {tensor}"
    assert re.findall(r'class="copy c(\d)"><p>data (\d)', html) == [
        ("0", "0"),
        ("1", "1"),
    ]


def test_the_stages_of_a_pipeline_have_their_devices():
    html = drawn(
        1,
        4,
        mesh=dataclasses.asdict(Mesh(data=2, pipeline=2)),
        pipeline={"stages": ["embed", "dense_<3>"]},
    )
    tiles = re.findall(r'class="device">(\S+?)<span>(.*?)<', html)
    assert [where for _, where in tiles] == ["stage 0", "stage 1"] * 2
    assert "stage 1 begins with <b>dense_&lt;3&gt;</b>" in html


def test_a_copy_of_the_weights_over_two_workers():
    html = drawn(2, 2, mesh=dataclasses.asdict(Mesh(fsdp=4)))
    where = re.findall(r"<span>(fsdp \d)<", html)
    assert where == ["fsdp 0", "fsdp 1", "fsdp 2", "fsdp 3"]


def test_replicas_are_counted_over_workers():
    html = drawn(2, 2, mesh=None)
    assert re.findall(r"<span>(replica \d)<", html) == [
        "replica 0",
        "replica 1",
        "replica 2",
        "replica 3",
    ]


def test_parameter_servers_have_their_roles():
    tasks = [
        {"task": "coordinator", "role": "deals out steps"},
        {"task": "worker 0", "role": "computes gradients"},
        {"task": "worker 1", "role": "computes gradients"},
        {"task": "ps 0", "role": "stores variables"},
    ]
    html = placement.draw(
        dataclasses.replace(
            REPORT, tasks=tasks, mesh=None, devices=[["GPU:0"], ["GPU:1"]]
        )
    )
    assert re.findall(r"<b>(.*?)</b> <span>(.*?)</span>", html) == [
        (task["task"], task["role"]) for task in tasks
    ]
    worker = html.index("worker 1")
    assert worker < html.index("GPU:1") < html.index("ps 0")
    assert html.count('class="device"') == 2


def test_a_column_of_time_is_divided_by_what_it_went_to():
    axis = tracks.axis_from_zero(40.0, "seconds")
    html = wall_time.draw(REPORT, axis)
    found = re.findall(
        r'<rect class="fc(\d)" x="([\d.]+)" y="([\d.]+)" '
        r'height="([\d.]+)" width="([\d.]+)">',
        html,
    )
    places = list(wall_time.PARTS)
    assert [
        (places[int(color)], *map(float, numbers)) for color, *numbers in found
    ] == [
        ("start", 0.0, 0.0, 100.0, 20.0),
        ("step", 20.0, 50.0, 50.0, 20.0),
        ("compile", 20.0, 0.0, 50.0, 20.0),
        ("step", 40.0, 50.0, 50.0, 20.0),
        ("compile", 40.0, 0.0, 50.0, 20.0),
        ("restart", 60.0, 0.0, 100.0, 20.0),
        # Half of the last column: the run ended in it.
        ("step", 80.0, 25.0, 75.0, 10.0),
        ("input", 80.0, 0.0, 25.0, 10.0),
    ]
    assert 'style="left:65.00%" title="loss nan in step 26"' in html
    assert 'style="left:90.00%" title="step 23: the newest"' in html


def test_runs_side_by_side_have_the_same_axes(folders):
    longer = dataclasses.replace(
        REPORT,
        events=[
            {"at": 7200.0, "what": "saved", "step": 1, "why": "it is time"}
        ],
    )
    html = page.page([page.Run("a", REPORT), page.Run("b", longer)])
    axes = re.findall(r'<div class="ticks">(.*?)</div>', html)
    assert len(axes) == 4
    assert axes[0] == axes[1]
    assert "hours since the run began" in axes[0]
    assert axes[2] == axes[3]


def test_what_steps_took_on_each_worker():
    html = step_times.draw(REPORT, tracks.log_axis(0.01, 0.2))
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", html)
    found = [row.split("</td><td>") for row in rows]
    assert [name for name, *_ in found] == ["worker 0", "worker 1"]
    for number, (_, *numbers) in enumerate(found, 1):
        expected = [10 * number, 10 * number, 100 * number, 100 * number, 10]
        assert list(map(float, numbers)) == pytest.approx(expected, rel=0.045)
    left = re.findall(r'class="first" style="left:([\d.]+)%', html)
    assert list(map(float, left)) == [0.0, pytest.approx(23.14, abs=0.1)]
    assert "5 steps a call" in html


@pytest.mark.parametrize(
    ("last", "unit", "ticks"),
    [
        (1.0, "seconds", ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (90061.0, "hours", ["0", "5", "10", "15", "20", "25"]),
        (0.0, "seconds", ["0"]),
    ],
)
def test_an_axis_of_time_has_units_that_people_read(last, unit, ticks):
    axis = tracks.time_axis(last)
    assert axis.name == f"{unit} since the run began"
    assert [text for _, text in axis.ticks][: len(ticks)] == ticks
    assert len(axis.ticks) <= 7
    assert axis.percent(last / 2) == pytest.approx(50.0 * (last > 0))


@pytest.mark.parametrize(
    ("low", "high"), [(1e-7, 1e5), (0.0101, 0.0102), (0.003, 0.5)]
)
def test_a_log_axis_reaches_all_with_few_ticks(low, high):
    axis = tracks.log_axis(low, high)
    assert axis.low <= low < high <= axis.high
    assert 2 <= len(axis.ticks) <= 7


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
    """Nothing is wider than the window, and charts can be read."""
    path = page.write(*folders, path=str(tmp_path / "both.html"))
    probe = (
        "<script>document.title=JSON.stringify({"
        "page:document.documentElement.scrollWidth,"
        "charts:[...document.querySelectorAll('svg')].map(s=>"
        "s.getBoundingClientRect().height),"
        "letters:[...document.querySelectorAll('.tick')].map(t=>"
        "t.getBoundingClientRect().height),"
        "inside:[...document.querySelectorAll('.device,.track,.ticks span')]"
        ".map(e=>{const c=e.closest('.card').getBoundingClientRect(),"
        "b=e.getBoundingClientRect();return b.width>0&&b.left>=c.left&&"
        "b.right<=c.right})})</script>"
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
    assert min(told["letters"]) > 11
    assert len(told["inside"]) > 30
    assert all(told["inside"])
