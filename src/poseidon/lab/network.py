"""Links, addresses, shaping and byte counters of a lab, by netlink alone (no ``ip`` or ``tc`` needed).

Each machine's ``eth0`` is one end of a veth pair; the other end, ``portN``, is in a bridge. The bridge has its own
namespace, so nothing of a lab is visible on the host, and labs cannot collide in names or addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from poseidon.errors import ConfigError
from poseidon.lab.namespace import HOW_TO_GET_PERMISSION, call_inside
from poseidon.lab.spec import LabSpec, LinkShape, machine_address

if TYPE_CHECKING:
    from pyroute2 import IPRoute

NETEM_HANDLE = 0x10000
# Packets netem may hold while it delays them: plenty, since the queue that matters is the token bucket's.
NETEM_LIMIT = 100_000
CLSACT_HANDLE, CLSACT_PARENT, INGRESS = 0xFFFF0000, 0xFFFFFFF1, 0xFFFFFFF2
"""Where programs for packets hang, by the kernel's numbers."""


_MODULES = {"tbf": "sch_tbf", "netem": "sch_netem", "clsact": "sch_ingress", "bpf": "cls_bpf"}


@dataclass(frozen=True)
class Traffic:
    """Bytes a machine has sent and received through its ``eth0``."""

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


def wire(spec: LabSpec, switch: int, machines: Sequence[int]) -> None:
    """Join the machines' namespaces (file descriptors) to the switch's, and shape every link."""
    call_inside([switch], lambda: _wire_switch(spec, machines))
    for machine, namespace in enumerate(machines):
        call_inside([namespace], partial(_wire_machine, spec, machine))


def read_traffic(switch: int, machines: int) -> list[Traffic]:
    """Return each machine's bytes since the lab started, read from its port at the switch."""
    return call_inside([switch], lambda: _read_ports(machines))


def set_link(switch: int, machine: int, is_up: bool) -> None:
    """Plug or unplug a machine's cable: without carrier packets vanish, and no connection is notified."""
    call_inside([switch], lambda: _set_port(machine, is_up))


def reshape(shape: LinkShape, has_netem: bool, switch: int, namespace: int, machine: int) -> None:
    """Give both ends of a machine's link another shape."""
    place = {"parent": NETEM_HANDLE + 1} if has_netem else {}
    call_inside([switch], lambda: _reshape(f"port{machine}", shape))
    call_inside([namespace], lambda: _reshape("eth0", shape, **place))


def hang_program(switch: int, machine: int, program: int) -> None:
    """Let a program of the kernel see every packet that a machine sends, in the place of an earlier one."""
    call_inside([switch], lambda: _hang_program(machine, program))


def remove_program(switch: int, machine: int) -> None:
    """Let a machine's packets pass again."""
    call_inside([switch], lambda: _remove_program(machine))


def open_netlink() -> IPRoute:
    """Return a netlink socket in the calling thread's namespace."""
    try:
        from pyroute2 import IPRoute
    except ImportError:
        raise ConfigError(
            "the lab needs pyroute2, which the extra 'lab' brings: pip install '.[lab]' in the checkout, "
            "or pip install pyroute2"
        ) from None
    return IPRoute()


def _wire_switch(spec: LabSpec, machines: Sequence[int]) -> None:
    with open_netlink() as netlink:
        _request(netlink.link, "add", ifname="switch", kind="bridge")
        bridge = netlink.link_lookup(ifname="switch")[0]
        netlink.link("set", index=bridge, state="up")
        for machine, namespace in enumerate(machines):
            port = f"port{machine}"
            _request(netlink.link, "add", ifname=port, kind="veth", peer={"ifname": "eth0", "net_ns_fd": namespace})
            index = netlink.link_lookup(ifname=port)[0]
            netlink.link("set", index=index, master=bridge, state="up")
            _shape(netlink, index, spec.shape(machine))


def _wire_machine(spec: LabSpec, machine: int) -> None:
    with open_netlink() as netlink:
        index = netlink.link_lookup(ifname="eth0")[0]
        netlink.addr("add", index=index, address=machine_address(machine), prefixlen=24)
        netlink.link("set", index=netlink.link_lookup(ifname="lo")[0], state="up")
        netlink.link("set", index=index, state="up")
        if not spec.delay_s and not spec.loss:
            _shape(netlink, index, spec.shape(machine))
            return
        _request(
            netlink.tc,
            "add",
            "netem",
            index=index,
            handle=NETEM_HANDLE,
            delay=round(spec.delay_s * 1e6),
            loss=spec.loss * 100,
            limit=NETEM_LIMIT,
        )
        _shape(netlink, index, spec.shape(machine), parent=NETEM_HANDLE + 1)


def _reshape(interface: str, shape: LinkShape, **place: int) -> None:
    with open_netlink() as netlink:
        _shape(netlink, netlink.link_lookup(ifname=interface)[0], shape, "replace", **place)


def _hang_program(machine: int, program: int) -> None:
    _remove_program(machine)
    with open_netlink() as netlink:
        index = netlink.link_lookup(ifname=f"port{machine}")[0]
        _request(netlink.tc, "add", "clsact", index=index, handle=CLSACT_HANDLE, parent=CLSACT_PARENT)
        _request(
            netlink.tc,
            "add-filter",
            "bpf",
            index=index,
            parent=INGRESS,
            fd=program,
            name="poseidon",
            direct_action=True,
        )


def _remove_program(machine: int) -> None:
    with open_netlink() as netlink:
        index = netlink.link_lookup(ifname=f"port{machine}")[0]
        if any(qdisc.get_attr("TCA_KIND") == "clsact" for qdisc in netlink.get_qdiscs(index=index)):
            _request(netlink.tc, "del", "clsact", index=index, handle=CLSACT_HANDLE, parent=CLSACT_PARENT)


def _shape(netlink: IPRoute, index: int, shape: LinkShape | None, verb: str = "add", **place: int) -> None:
    if shape is None:
        return
    _request(
        netlink.tc,
        verb,
        "tbf",
        index=index,
        rate=shape.rate_bytes,
        burst=shape.burst_bytes,
        limit=shape.queue_bytes,
        **place,
    )


def _request(call: Any, *words: str, **options: Any) -> None:
    """Make one netlink request; explain a refusal in words."""
    from pyroute2 import NetlinkError

    try:
        call(*words, **options)
    except NetlinkError as error:
        kind = options.get("kind", words[-1])
        if error.code in (1, 13):  # EPERM, EACCES
            raise ConfigError(f"not permitted to add {kind}; {HOW_TO_GET_PERMISSION}") from None
        module = _MODULES.get(kind, kind)
        raise ConfigError(
            f"the kernel refused to add {kind} ({error}); it needs {module}: try `modprobe {module}`"
            + (", or leave out --delay and --loss" if kind == "netem" else "")
        ) from None


def _read_ports(machines: int) -> list[Traffic]:
    with open_netlink() as netlink:
        stats = {link.get_attr("IFLA_IFNAME"): link.get_attr("IFLA_STATS64") for link in netlink.get_links()}
    ports = [stats[f"port{machine}"] for machine in range(machines)]
    return [Traffic(sent=port["rx_bytes"], received=port["tx_bytes"]) for port in ports]


def _set_port(machine: int, is_up: bool) -> None:
    with open_netlink() as netlink:
        index = netlink.link_lookup(ifname=f"port{machine}")[0]
        netlink.link("set", index=index, state="up" if is_up else "down")
