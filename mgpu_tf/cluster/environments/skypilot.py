"""The nodes of a task of SkyPilot, from its environment variables.

SKYPILOT_NODE_IPS      an address in each line, the head node first
SKYPILOT_NODE_RANK     the number of this node
SKYPILOT_NUM_NODES     the number of nodes
"""

from __future__ import annotations

from collections.abc import Mapping

from mgpu_tf.cluster.environments.place import DEFAULT_PORT, Place, chosen_port
from mgpu_tf.cluster.roles import Roles, number
from mgpu_tf.errors import ClusterError


def detect(environ: Mapping[str, str]) -> bool:
    """Returns whether SkyPilot has started this process."""
    return "SKYPILOT_NODE_RANK" in environ


def read(environ: Mapping[str, str]) -> tuple[Place | None, list[str]]:
    """Returns the place of this node, and hints; None for a single node.

    Args:
        environ: The environment.

    Raises:
        ClusterError: The variables contradict each other.
    """
    hosts = environ.get("SKYPILOT_NODE_IPS", "").split()
    count = number(environ, "SKYPILOT_NUM_NODES", len(hosts))
    rank = number(environ, "SKYPILOT_NODE_RANK")
    if count != len(hosts) or rank >= count or len(set(hosts)) != count:
        raise ClusterError(
            "SkyPilot must name each node once. Received: "
            f"SKYPILOT_NUM_NODES={count}, SKYPILOT_NODE_RANK={rank}, "
            f"SKYPILOT_NODE_IPS={' '.join(hosts)!r}. Set TF_CONFIG, or "
            "TF_CONFIG={} for a single process."
        )
    if count == 1:
        return None, []
    port = chosen_port(environ, DEFAULT_PORT)
    place = Place(
        f"SkyPilot task of {count} nodes",
        Roles.cut(count, environ),
        tuple(f"{bracketed(host)}:{port}" for host in hosts),
        rank,
    )
    return place, []


def bracketed(host: str) -> str:
    """Returns a host as it stands before a port: IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host
