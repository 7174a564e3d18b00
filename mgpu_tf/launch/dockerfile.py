"""The text of a Dockerfile for a project that trains with `mgpu_tf`.

    text = dockerfile(("python", "train.py"), gpu=True)

It builds on the image of the `Dockerfile` of this repository. A pure function
of its arguments: it reads nothing and runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from mgpu_tf.errors import ConfigurationError
from mgpu_tf.fields import checked
from mgpu_tf.launch.job import check_command

# The user that pods of `mgpu-tf kubernetes` run as.
USER_ID = 1000

_TEXT = """\
# In a clone of mgpu_tf: docker build --tag=mgpu-tf:{kind}{argument} .
# Here:                  docker build --tag=NAME .
FROM mgpu-tf:{kind}

{requirements}WORKDIR /project
COPY . .

# This user writes to /tmp and to mounted volumes only.
USER {user}
{command}"""

_REQUIREMENTS = """\
# Before the code, whose changes then install nothing again.
USER root
COPY requirements.txt /packages/
RUN pip install --requirement=/packages/requirements.txt

"""


@checked
def dockerfile(
    command: Sequence[str],
    *,
    gpu: bool,
    requirements: bool = False,
    user_id: int = USER_ID,
) -> str:
    """Returns a Dockerfile for the folder of a project.

    Args:
        command: What a container runs by default; empty for none.
        gpu: Whether TensorFlow comes with the CUDA libraries. The driver is
            that of the node.
        requirements: Whether the folder has a `requirements.txt`.
        user_id: The user that a container runs as.

    Raises:
        ConfigurationError: The command is no text, or the user is root.
    """
    check_command(command)
    if user_id < 1:
        raise ConfigurationError(
            "A container must not run as root. Received: "
            f"user_id={user_id}. Use 1 or more, such as {USER_ID}."
        )
    return _TEXT.format(
        kind="gpu" if gpu else "cpu",
        argument=" --build-arg=EXTRAS=gpu" if gpu else "",
        requirements=_REQUIREMENTS if requirements else "",
        user=user_id,
        command=f"CMD {json.dumps(list(command))}\n" if command else "",
    )
