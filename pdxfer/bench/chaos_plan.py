"""Where the processes of a chaos run are and how they are started. Pure, but for the ports, which the OS chooses.

near: client, router, proxy, store, engines ── link, if there is one ── far: last prefill, last of several decode
"""

import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from pdxfer.bench.chaos_faults import DISK, LINK, PROXY, ROUTER, STORE
from pdxfer.bench.ttft_link import LinkPlan

SERVED_NAME = "chaos"
_MEMORY_PART = 0.5
"""DRAM tier's size over the disk tier's: small, so that the disk is read too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One engine."""

    role: str
    port: int
    cpus: str
    is_far: bool


class Plan:
    """A cluster with `num_prefill` and `num_decode` engines; a store with its disk tier below `store_dir`."""

    def __init__(
        self, *, engine: str, num_prefill: int, num_decode: int, sets: Sequence[str], link: LinkPlan | None = None,
        store_dir: str = "", disk_gib: float = 0.0,
    ) -> None:  # fmt: skip
        self._link, self._has_store = link, bool(store_dir)
        self._near = link.prefill_host if link else "127.0.0.1"
        self._ports = _free_ports(self._near, 3 + num_prefill + num_decode)
        self.engines = self._placed(num_prefill, num_decode)
        proxy, router, controller = self._ports[:3]
        self._router = f"tcp://{self._near}:{router}"
        self.proxy_url, self.controller_url = f"http://{self._near}:{proxy}", f"http://{self._near}:{controller}"
        self.env = {"UCX_TLS": "tcp"} if link else {}
        self._sets = [
            f"engine.kind={engine}", f"model.served_name={SERVED_NAME}", "engine.max_restarts=10000",
            f"proxy.port={proxy}", f"router.port={router}", f"controller.port={controller}", "network.ports=[0, 0]",
            *(["security.allow_insecure=true"] if link else []), *_store(store_dir, disk_gib), *sets,
        ]  # fmt: skip

    @property
    def targets(self) -> list[str]:
        """What may be hurt."""
        found = [ROUTER, PROXY, *self.engines]
        found += [LINK] if self._link else []
        return found + ([STORE, DISK] if self._has_store else [])

    @property
    def num_decode(self) -> int:
        return sum(place.role == "decode" for place in self.engines.values())

    @property
    def far(self) -> set[str]:
        """Engines beyond the link."""
        return {name for name, place in self.engines.items() if place.is_far}

    def engine_url(self, engine_id: str) -> str:
        """HTTP base of one engine."""
        place = self.engines[engine_id]
        return f"http://{self._link.decode_host if self._link and place.is_far else self._near}:{place.port}"

    def commands(self) -> list[list[str]]:
        """One launcher for the near side and one for each far engine."""
        near = [*self._prefix(False), *_launch("all"), *self._flags(self._near, is_far=False)]
        found = [near]
        for name in sorted(self.far):
            assert self._link is not None
            place = self.engines[name]
            command = [*self._prefix(True), *_launch(place.role), "--engine-id", name, "--router", self._router]
            found.append([*command, *self._flags(self._link.decode_host, is_far=True)])
        return found

    def _prefix(self, is_far: bool) -> list[str]:
        if self._link is None:
            return []
        return list(self._link.site.decode_prefix if is_far else self._link.site.prefill_prefix)

    def _flags(self, host: str, *, is_far: bool) -> list[str]:
        sets = [*self._sets, f"network.bind={host}"]
        for role in ("prefill", "decode"):
            places = [
                {"id": name, "port": place.port, "cpus": place.cpus}
                for name, place in self.engines.items()
                if place.role == role and place.is_far == is_far
            ]
            sets.append(f"topology.{role}={msgspec.json.encode(places).decode()}")
        return [word for setting in sets for word in ("--set", setting)]

    def _placed(self, num_prefill: int, num_decode: int) -> dict[str, Place]:
        cores = sorted(os.sched_getaffinity(0))
        names = [f"p{i}" for i in range(num_prefill)] + [f"d{i}" for i in range(num_decode)]
        far = {f"p{num_prefill - 1}", *([f"d{num_decode - 1}"] if num_decode > 1 else [])} if self._link else set()
        return {
            name: Place(
                role="prefill" if name[0] == "p" else "decode", port=self._ports[3 + index],
                cpus=str(cores[index % len(cores)]), is_far=name in far,
            )
            for index, name in enumerate(names)
        }  # fmt: skip


def _launch(role: str) -> list[str]:
    return [sys.executable, "-m", "pdxfer.cli.main", "launch", "--role", role, "--config", "cpu-1p1d"]


def _store(folder: str, disk_gib: float) -> list[str]:
    if not folder:
        return []
    tiers = [
        {"url": "dram:", "capacity_gib": disk_gib * _MEMORY_PART},
        {"url": f"file://{folder}", "capacity_gib": disk_gib},
    ]
    tiers_json = msgspec.json.encode(tiers).decode()
    return ["store.enabled=true", f"store.shared_memory={folder}.sock", f"store.tiers={tiers_json}"]


def _free_ports(host: str, count: int) -> list[int]:
    probes = [socket.create_server((host, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
