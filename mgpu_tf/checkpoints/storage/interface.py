"""What checkpoints ask of the storage that keeps them.

`disk` and `objects` are kinds of it. What a kind cannot do by itself, such as a
rename on object storage, is inside of the steps of a save: `part`, `place`,
`seal`, `finish`. All errors of a storage are `OSError`s; what is not there is a
`FileNotFoundError`. This module does not import TensorFlow, Keras or NumPy.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from typing import IO

PREFIX = "step-"
UNFINISHED = ".unfinished-"
REPLACED = f"{UNFINISHED}replaced-"
ASIDE = "damaged-"


class PartFile(abc.ABC):
    """The file of a checkpoint that one process writes.

    Attributes:
        name: Its name in the checkpoint.
    """

    name: str

    @abc.abstractmethod
    def write(self, chunk: bytes) -> object:
        """Takes bytes, and waits for no disk and no network."""

    @abc.abstractmethod
    def end(self, size: int) -> str:
        """Waits until all is stored.

        Args:
            size: How many bytes there are.

        Returns:
            Their checksum.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Closes it, whatever became of it."""

    @abc.abstractmethod
    def drop(self) -> None:
        """Gives up, and leaves the storage the room that it had."""


class Claim(abc.ABC):
    """A folder that this run has taken."""

    @abc.abstractmethod
    def seen(self, *, wait: bool) -> str:
        """Returns what the file of the owner has.

        Args:
            wait: Whether it is read now, however long that takes; otherwise
                what was read a few seconds ago will do.

        Raises:
            OSError: It is not there, or cannot be read.
        """

    @abc.abstractmethod
    def release(self) -> None:
        """Ends the claim: this run writes nothing there from now on."""


class Notes(abc.ABC):
    """A file of fixed places that the thread which trains writes to."""

    @abc.abstractmethod
    def write_at(self, offset: int, data: bytes) -> None:
        """Writes bytes at a place; does not wait for a network."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the file; nothing is written after this call."""


class Storage(abc.ABC):
    """A kind of storage. Paths are whole ones, of folders or files there.

    Attributes:
        look_seconds: How often to look for what another process will leave.
    """

    look_seconds: float

    # What is there.

    @abc.abstractmethod
    def names(self, folder: str) -> list[str]:
        """Returns the names in a folder; of unfinished steps, none by `step-`.

        Raises:
            FileNotFoundError: The folder is not there.
        """

    @abc.abstractmethod
    def is_folder(self, path: str) -> bool:
        """Returns whether there is such a folder."""

    @abc.abstractmethod
    def exists(self, path: str) -> bool:
        """Returns whether a checkpoint has this name, whole or not."""

    @abc.abstractmethod
    def is_link(self, path: str) -> bool:
        """Returns whether the folder of a checkpoint is a link."""

    @abc.abstractmethod
    def text(self, path: str, most: int = -1) -> bytes:
        """Returns the bytes of a small file, the first `most` of them."""

    @abc.abstractmethod
    def size(self, path: str) -> int:
        """Returns the size of a file."""

    @abc.abstractmethod
    def reading(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Opens a file that nobody writes over while it is read."""

    # Small files.

    @abc.abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Writes a file whole or not at all, in the place of the one before."""

    @abc.abstractmethod
    def append(self, path: str, data: bytes) -> None:
        """Adds to the end of a file that no other process writes."""

    @abc.abstractmethod
    def remove(self, path: str) -> None:
        """Deletes a file; one that is not there is no error."""

    @abc.abstractmethod
    def notes(self, path: str) -> Notes:
        """Opens notes; they are made where they are missing."""

    @abc.abstractmethod
    def read_notes(self, path: str) -> bytes:
        """Returns the bytes of notes, zeros where nothing was written."""

    @abc.abstractmethod
    def remove_notes(self, path: str) -> None:
        """Deletes notes; nothing of them comes later."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Waits until all notes are stored; raises no error of theirs."""

    # The folder of a run.

    @abc.abstractmethod
    def make(self, name: str, folder: str) -> None:
        """Makes a folder where it is missing.

        Args:
            name: The argument or flag that it came from.
            folder: Its path.

        Raises:
            ConfigurationError: It cannot be made.
        """

    @abc.abstractmethod
    def is_writable(self, folder: str) -> bool:
        """Returns whether this process may write there."""

    @abc.abstractmethod
    def claim(self, path: str, text: str) -> Claim:
        """Makes this run the owner of a folder, whoever was before.

        Args:
            path: The file of the owner.
            text: What it shall have.
        """

    @abc.abstractmethod
    def living(self, path: str) -> str:
        """Returns what the file of an owner has that lives, "" for none."""

    # A save.

    @abc.abstractmethod
    def part(
        self, folder: str, step: int, token: str, process: int, *, at_once: bool
    ) -> PartFile:
        """Opens the file that a process writes of a step.

        Args:
            folder: Where checkpoints are kept; made where it is missing.
            step: The global step.
            token: A word of the run.
            process: The number of the process.
            at_once: Whether writing must not wait. Otherwise it may, and
                takes neither memory nor disk for all bytes.
        """

    @abc.abstractmethod
    def place(self, folder: str, step: int, token: str) -> str:
        """Returns where the files of a step are before it is whole."""

    @abc.abstractmethod
    def seal(self, place: str, text: bytes) -> None:
        """Writes the manifest, where that does not make the step whole yet."""

    @abc.abstractmethod
    def finish(self, place: str, path: str, text: bytes) -> None:
        """Makes a checkpoint of what is in its place.

        Args:
            place: From `place`.
            path: The name of the checkpoint; a whole one is replaced.
            text: The manifest.
        """

    @abc.abstractmethod
    def move_aside(self, path: str, other: str, new: Collection[str]) -> None:
        """Keeps a checkpoint that is not whole by another name.

        Args:
            path: Its path, which a new one will have.
            other: Its path from now on, which nothing has.
            new: The names of the files of the new one.
        """

    @abc.abstractmethod
    def abandon(self, folder: str, step: int, token: str) -> None:
        """Deletes what a run has written of a step that is not whole."""

    @abc.abstractmethod
    def abandon_earlier(self, folder: str, step: int, token: str) -> None:
        """Deletes what a run has written of earlier unfinished steps."""

    # Deleting.

    @abc.abstractmethod
    def unfinished(self, folder: str, token: str | None) -> list[str]:
        """Returns the paths of what killed processes have left unfinished.

        Args:
            folder: Where checkpoints are kept.
            token: Of a run that is writing there; what is its own is left out.
        """

    @abc.abstractmethod
    def recover(self, folder: str, names: Iterable[str]) -> None:
        """Gives back its name to what was about to be replaced.

        Args:
            folder: Where checkpoints are kept.
            names: What is there.
        """

    @abc.abstractmethod
    def keep_to_write_over(self, folder: str, path: str, token: str) -> None:
        """Takes the files of a checkpoint that would be deleted for the next.

        Where a file system gains nothing by it, the checkpoint stays, and is
        deleted as others are.
        """

    @abc.abstractmethod
    def forget_written_over(self, folder: str, token: str) -> None:
        """Deletes the files that a run would write over next."""

    @abc.abstractmethod
    def remove_all(self, path: str) -> None:
        """Deletes a folder as far as that works.

        A checkpoint that is deleted in part is not taken for a damaged one.
        """


def unfinished_path(folder: str, step: int, token: str) -> str:
    """Returns where processes leave word of a checkpoint that is written."""
    return os.path.join(folder, f"{UNFINISHED}{PREFIX}{step:010d}-{token}")


def step_of_unfinished(name: str, token: str) -> int | None:
    """Returns the step of such a folder of a run, None of what is none."""
    begins = UNFINISHED + PREFIX
    number = name.removeprefix(begins).split("-")[0]
    if (
        name.startswith(begins)
        and name.endswith(f"-{token}")
        and number.isdecimal()
    ):
        return int(number)
    return None
