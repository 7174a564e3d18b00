"""What the import of TensorFlow prints, with a TensorFlow made for it."""

import pytest

from tests import clusters


@pytest.mark.parametrize(
    ("end", "status", "shown"),
    [
        ("pass", 0, False),
        ("raise KeyboardInterrupt", 130, False),
        ("raise ImportError", 1, True),
    ],
)
def test_it_is_shown_where_the_import_fails(end, status, shown, tmp_path):
    """Ctrl-C is no failure."""
    (tmp_path / "tensorflow.py").write_text(
        f"import os\nos.write(2, b'a line of its own')\n{end}\n"
    )
    done = clusters.run(
        [
            "-c",
            "from mgpu_tf.runtime import quiet_import\n"
            "try: quiet_import.import_tensorflow()\n"
            "except KeyboardInterrupt: raise SystemExit(130)",
        ],
        cwd=tmp_path,
    )
    assert done.returncode == status, done.stderr
    assert ("a line of its own" in done.stderr) == shown
