"""Which share of each global batch the workers take.

    Balance.of("2,1", num_workers=2, replicas=2).shares     # (2, 1)
    shares_for([100.0, 50.0])                               # (667, 333)

Equal shares waste the time of fast workers, which wait for the slow ones in
every step. Shares in proportion to speed let all finish together. The global
batch stays the same, and so do the numbers: a gradient is a sum over the rows
of the global batch, whoever computes them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from mgpu_tf.errors import ConfigurationError, is_integer
from mgpu_tf.names import Shares

AUTO = "auto"

# Shares that were measured add up to this.
PARTS = 1000
# What new shares must save of the time of a step, so that noise moves nothing.
WORTH = 0.05


@dataclasses.dataclass
class Balance:
    """The shares of the workers; on one machine, of the replicas.

    Attributes:
        shares: A number for each; None for equal shares.
        measured: Whether the shares follow from measured speed.
    """

    shares: tuple[int, ...] | None = None
    measured: bool = False

    @classmethod
    def of(cls, given: Shares, num_workers: int, num_replicas: int) -> Balance:
        """Returns the balance that an option asks for.

        Args:
            given: None, "auto", numbers, or numbers in a text as "2,1".
            num_workers: Processes of the strategy.
            num_replicas: Replicas of all of them.

        Raises:
            ConfigurationError: It is none of these, or its length is wrong.
        """
        if given is None:
            return cls()
        if given == AUTO:
            if num_workers == 1:
                raise ConfigurationError(
                    "balance='auto' compares workers. Received: one worker. "
                    "Leave it out, or give the shares of its replicas, such "
                    "as balance='2,1'."
                )
            return cls(measured=True)
        shares = _numbers(given)
        count = num_workers if num_workers > 1 else num_replicas
        if len(shares) != count:
            what = "worker" if num_workers > 1 else "replica"
            raise ConfigurationError(
                f"balance must have a number for each {what}. Received: "
                f"balance={given!r} for {count}. Write "
                f"balance={','.join(['1'] * count)!r}, with larger numbers "
                "for faster ones."
            )
        return cls(shares)

    def bounds(self, num_replicas: int) -> tuple[int, ...] | None:
        """Returns where the ranges of replicas begin and end.

        Example:
            >>> Balance((2, 1)).bounds(4)
            (0, 2, 4, 5, 6)

        Args:
            num_replicas: Replicas; those of a worker share alike.

        Returns:
            One number more than there are replicas; None for equal shares.
        """
        if self.shares is None:
            return None
        each = num_replicas // len(self.shares)
        parts = [share for share in self.shares for _ in range(each)]
        return (0, *itertools.accumulate(parts))

    def __str__(self) -> str:
        if self.shares:
            return ",".join(map(str, self.shares))
        return AUTO if self.measured else "equal"


def shares_for(rates: Sequence[float]) -> tuple[int, ...]:
    """Returns shares of `PARTS` in proportion to rates, 1 or more each.

    Example:
        >>> shares_for([100.0, 50.0])
        (667, 333)

    Args:
        rates: Rows per second of each worker.
    """
    total = sum(rates)
    exact = [max(1.0, PARTS * rate / total) for rate in rates]
    shares = [int(share) for share in exact]
    rest = PARTS - sum(shares)
    by_remainder = sorted(range(len(rates)), key=lambda i: shares[i] - exact[i])
    for index in by_remainder[: max(rest, 0)]:
        shares[index] += 1
    return tuple(shares)


def balanced(
    rates: Sequence[float], shares: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Returns shares that are worth a change, None where they are not.

    Args:
        rates: Rows per second of each worker.
        shares: The shares of now; None for equal ones.
    """
    if not all(rate > 0 for rate in rates):
        return None
    now = shares or [1] * len(rates)
    new = shares_for(rates)

    def seconds(of: Sequence[int]) -> float:
        return max(s / sum(of) / r for s, r in zip(of, rates, strict=True))

    return new if seconds(new) < (1 - WORTH) * seconds(now) else None


def _numbers(given: Shares) -> tuple[int, ...]:
    parts = given.split(",") if isinstance(given, str) else list(given or ())
    shares = [
        int(part)
        for part in parts
        if (isinstance(part, str) and part.strip().isdecimal())
        or is_integer(part)
    ]
    if not parts or len(shares) != len(parts) or min(shares) < 1:
        raise ConfigurationError(
            "balance must be 'auto', or numbers of 1 or more. Received: "
            f"balance={given!r}. Write balance='2,1' where the first is twice "
            "as fast."
        )
    return tuple(shares)
