"""Names and addresses of machines, by the standards; the one place for them.

    parse("Node-7.lab:2222")      # Address("node-7.lab", 2222)
    parse("[::0:1]:2222")         # Address("::1", 2222)
    host_of("1.2.3.999")          # ValueError: no IPv4 address

What stands in TF_CONFIG, in --hosts, and what a scheduler says goes through
here. Two texts of one machine give the same `Address`.

References:
    Names: RFC 1123, section 2.1, and RFC 1035, section 2.3. Machines with an
    underscore in their name exist, and DNS has them (RFC 2181, section 11).
    IPv6 before a port, in brackets: RFC 3986, section 3.2.2.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import re

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_LONGEST_NAME = 253
_PORT = re.compile(r"[0-9]{1,5}")
_LOCAL = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a task serves.

    Attributes:
        host: A name in small letters without a last dot, or an IP address
            in its shortest form, without brackets.
        port: 1 to 65535.
    """

    host: str
    port: int


def parse(text: str) -> Address:
    """Returns the address that `host:port` is.

    Args:
        text: Such as `host0:2222` or `[::1]:2222`.

    Raises:
        ValueError: It is none; the message says why.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError("no host:port")
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise ValueError("no port of 1 to 65535")
    return Address(host_of(host), int(port))


def host_of(text: str) -> str:
    """Returns a host as `Address` has it.

    Args:
        text: A name, an IPv4 address, or an IPv6 address in brackets.

    Raises:
        ValueError: It is none; the message says why.
    """
    if text.startswith("[") and text.endswith("]"):
        return _ip(text[1:-1], 6)
    if ":" in text:
        raise ValueError("an IPv6 address stands in brackets")
    name = text.removesuffix(".")
    labels = name.split(".")
    if labels[-1].isdecimal() or labels[-1][:2].lower() == "0x":
        # So no name ends; others would read it as 4 bytes in some form.
        return _ip(name, 4)
    if len(name) > _LONGEST_NAME or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(
            "no name of letters, digits, dashes and dots, with parts of at "
            "most 63"
        )
    name = name.lower()
    return _LOCAL if name == "localhost" else name


def _ip(text: str, version: int) -> str:
    try:
        if "%" in text:
            raise ValueError
        address = (
            ipaddress.IPv4Address(text)
            if version == 4
            else ipaddress.IPv6Address(text)
        )
    except ValueError:
        raise ValueError(f"no IPv{version} address") from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError("an address of no single machine")
    return str(address)
