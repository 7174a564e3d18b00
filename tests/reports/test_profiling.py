import glob
import json
import os
import re

import pytest

import mgpu_tf
from mgpu_tf.reports import perfetto
from mgpu_tf.reports.profile_file import length_of_union
from mgpu_tf.reports.profiling import Profiler


def test_room_ends_where_the_trace_begins_and_ends():
    profiler = Profiler(10, 5, None)
    assert [profiler.room(done, 8) for done in (0, 7, 10, 13, 15)] == [
        8,
        3,
        5,
        2,
        8,
    ]
    assert Profiler(0, 0, None).room(0, 8) == 8


def testlength_of_union():
    assert length_of_union([]) == 0
    assert length_of_union([(5, 9), (0, 2), (1, 3), (6, 7)]) == 7


def test_trace_of_a_run(tmp_path, caplog):
    folder = str(tmp_path)
    caplog.set_level("INFO", logger="mgpu_tf")
    mgpu_tf.run(
        mgpu_tf.RunConfig(
            strategy="mirrored",
            num_virtual_devices=2,
            model="mlp",
            epochs=2,
            steps_per_epoch=6,
            data_dir=os.path.join(folder, "data"),
            output_dir=folder,
            profile="4,5",
        ),
        verbose=0,
    )
    pattern = os.path.join(folder, "profile", "**", "*.xplane.pb")
    assert len(glob.glob(pattern, recursive=True)) == 1
    (line,) = [m for m in caplog.messages if m.startswith("profile of")]
    found = re.findall(r"(forward\+backward|reduce|apply) ([\d.]+)", line)
    assert line.startswith("profile of 5 steps")
    assert [name for name, _ in found] == [
        "forward+backward",
        "reduce",
        "apply",
    ]
    path = os.path.join(folder, "step.json")
    count = perfetto.write(os.path.join(folder, "profile"), path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    timed = [event for event in events if event["ph"] == "X"]
    assert count == len(timed) > 50
    assert {"forward_backward", "reduce", "apply"} <= {e["cat"] for e in timed}
    assert min(event["ts"] for event in timed) == 0
    threads = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M"}
    assert {(event["pid"], event["tid"]) for event in timed} <= threads
    step = float(re.search(r"([\d.]+) ms each", line)[1])
    assert all(0 < float(seconds) <= step for _, seconds in found)


def test_steps_that_were_not_reached():
    assert "not reached" in Profiler(10, 5, "nowhere").summary()


@pytest.mark.parametrize("value", ["10", "a,b", "10,0", "-1,5", "1,2,3"])
def test_malformed(value):
    with pytest.raises(mgpu_tf.ConfigurationError, match="profile is two"):
        mgpu_tf.RunConfig(profile=value, output_dir="runs")
    with pytest.raises(mgpu_tf.ConfigurationError, match="with output_dir"):
        mgpu_tf.RunConfig(profile="1,2")
