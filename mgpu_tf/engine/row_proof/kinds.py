"""What can be proven of a tensor."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Kind:
    """What is proven of a tensor."""

    name: str


@dataclasses.dataclass(frozen=True)
class Rows(Kind):
    """A tensor with an axis of rows.

    Attributes:
        axis: The axis.
        block: The neighbours on it that belong to one example, as in flattened
            sequences: a number, or a name of one that is known in a step
            alone.
        listed: Whether it is a list of tensors of this kind.
    """

    name: str = "rows"
    axis: int = 0
    block: Any = 1
    listed: bool = False


@dataclasses.dataclass(frozen=True)
class Spread(Kind):
    """Images of which each has become several, as for dilated convolutions.

    Along the first axis are the first parts of all images, then the second.

    Attributes:
        block: Into how many parts each axis of an image is divided.
    """

    name: str = "spread"
    block: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sizes(Kind):
    """One length or a vector of lengths.

    Attributes:
        lengths: Of each element: its number, `ROWS` for the number of rows,
            `ANY` for a length that rows do not change.
        scalar: Whether it is one length, and no vector.
    """

    name: str = "sizes"
    lengths: tuple[Any, ...] = ()
    scalar: bool = False


@dataclasses.dataclass(frozen=True)
class Held(Kind):
    """What a variable held before a step, plus something.

    Attributes:
        added: What was added to it, or the extreme that it was compared with;
            `NOTHING` at first.
        alike: Whether all replicas held the same.
    """

    name: str = "held"
    added: Kind = Kind("nothing")
    alike: bool = False


NOTHING = Kind("nothing")
FIXED, SUM, MEAN = Kind("fixed"), Kind("sum"), Kind("mean")
LARGEST, SMALLEST = Kind("largest"), Kind("smallest")
UNPROVEN, OTHERS = Kind("unproven"), Kind("of another replica")
ROWS, ANY = "rows", "any"
