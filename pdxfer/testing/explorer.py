"""Runs whole transfers under seeded faults on one thread and checks the invariants: `run(seed)`.

`python -m pdxfer.testing.explorer --count 20000` explores; `--seed N --trace` replays one schedule. Real: the router's
state and the transfers' state machines. Simulated: engines, workers, channels, proxy and network (sim_*.py).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pdxfer.testing.fault_plan import Accident
from pdxfer.testing.sim_decode import SimDecode
from pdxfer.testing.sim_engine import NUM_BLOCKS, SimChannel, SimEngine
from pdxfer.testing.sim_prefill import SimPrefill
from pdxfer.testing.sim_proxy import REQUEST_S, SimProxy
from pdxfer.testing.sim_world import BEAT_S, SETTINGS, World

MAX_EVENTS = 20_000
ARRIVE_S = 1.0
CALM_S = SETTINGS.lease_s + 2 * BEAT_S
"""After the last request's deadline: leases expire, everybody reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one schedule came to."""

    seed: int
    problems: tuple[str, ...]
    """Invariants that did not hold; empty if all did."""
    ends: dict[str, int]
    """Requests by how they ended: ok, failed, busy, timeout, aborted, cut."""
    faults: dict[str, int]
    """Injected, by kind."""
    num_events: int
    num_delivered: int
    """Transfers whose KV all came over the wire."""
    num_resumed: int
    """Transfers that another prefill took over."""


class Cluster:
    """Two prefill engines, two decode engines, a proxy and a router, all joined."""

    def __init__(self, seed: int, trace: Callable[[str], None] | None, grants_name_generation: bool) -> None:
        self._seed = seed
        self.world = world = World(seed, trace, grants_name_generation)
        prefills = [SimPrefill(world, name) for name in ("p0", "p1")]
        decodes = [SimDecode(world, name) for name in ("d0", "d1")]
        self.engines: list[SimEngine] = [*prefills, *decodes]
        self.prefills, self.decodes = prefills, decodes
        self.channels = [self._channel(prefill, decode) for prefill in prefills for decode in decodes]
        self._join()
        self.proxy = SimProxy(world, prefills, decodes)
        self._num_requests = world.rng.randint(1, 5)
        for number in range(self._num_requests):
            args = (f"r{number}", world.rng.randint(20, 90))
            world.at(world.rng.uniform(0.1, ARRIVE_S), None, self.proxy.ask, *args)

    def _channel(self, prefill: SimPrefill, decode: SimDecode) -> SimChannel:
        channel = SimChannel(self.world, prefill, decode)
        channel.on_arrived = lambda write: decode.receiver.arrived(write)
        channel.on_done = prefill.done
        channel.num_taken_back = lambda: decode.receiver.generation
        channel.on_lost = [prefill.lost, lambda lost: decode.receiver.lost(lost)]
        prefill.channels[decode.name] = decode.channels[prefill.name] = channel
        return channel

    def _join(self) -> None:
        """Without faults: these are for what comes after."""
        self.world.plan.calm = True
        for engine in self.engines:
            engine.say_hello()
            self.world.at(self.world.rng.uniform(0, BEAT_S), engine, engine.beat)
        self.world.at(0.03, None, self.world.router.tick)
        self.world.at(0.1, None, setattr, self.world.plan, "calm", False)

    def run(self) -> Outcome:
        """The whole schedule."""
        world = self.world
        accidents = list(world.plan.accidents)
        calm_at = world.now + ARRIVE_S + REQUEST_S + 0.5
        first = 60  # joining takes about so many events
        while world.now < calm_at + CALM_S and world.num_events < MAX_EVENTS:
            if world.now >= calm_at:
                world.plan.calm = True
            while accidents and world.num_events >= first + accidents[0].step:
                self._happen(accidents.pop(0))
            world.step()
        self._check()
        return Outcome(
            seed=self._seed,
            problems=tuple(world.problems),
            ends=Counter(end for asked in self.proxy.asked.values() for end in asked.ends),
            faults=world.plan.counts,
            num_events=world.num_events,
            num_resumed=sum(decode.num_resumed for decode in self.decodes),
            num_delivered=world.router.state.out.counts["ended", "delivered"],
        )

    def _happen(self, accident: Accident) -> None:
        world, parties = self.world, [*self.engines, self.proxy, self.world.router]
        victim = parties[accident.victim % len(parties)]
        if not victim.is_alive or world.plan.calm:
            return
        world.plan.counts[accident.kind] += 1
        world.note(f"{accident.kind} of {victim.name} for {accident.seconds:.2f} s")
        if accident.kind == "crash":
            victim.crash(accident.seconds)
        elif accident.kind == "hang":
            victim.hung_until = world.now + accident.seconds
        elif accident.kind == "partition":
            victim.cut_until = world.now + accident.seconds
        elif accident.kind == "cut":
            self.channels[accident.victim % len(self.channels)].fence()
        else:
            self.proxy.abort(accident.victim)

    # ---- invariants ------------------------------------------------------------------------------------------

    def _check(self) -> None:
        world = self.world
        world.check_router(at_end=True)
        for asked in self.proxy.asked.values():
            if len(asked.ends) != 1:
                world.violated(f"request {asked.request_id} ended {len(asked.ends)} times")
        if len(self.proxy.asked) != self._num_requests:
            world.violated(f"{self._num_requests} requests were sent, {len(self.proxy.asked)} seen")
        for engine in self.engines:
            if len(engine.free) != NUM_BLOCKS or engine.owner:
                world.violated(f"{engine.name}: blocks are not back: {engine.owner}")
        for prefill in self.prefills:
            if prefill.sending:
                world.violated(f"{prefill.name}: sends are left: {list(prefill.sending)}")
        for decode in self.decodes:
            if decode.jobs or decode.receiver.incoming:
                world.violated(f"{decode.name}: left are {list(decode.jobs)}, {list(decode.receiver.incoming)}")


def run(seed: int, trace: Callable[[str], None] | None = None, *, grants_name_generation: bool = True) -> Outcome:
    """One schedule; the same seed gives the same one. `grants_name_generation`: a writer drops a Grant that is older
    than its channel; without it a Grant that is overtaken by a fence fills blocks of others."""
    return Cluster(seed, trace, grants_name_generation).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Many schedules."""

    num_schedules: int
    failing: list[Outcome]
    ends: Counter[str]
    faults: Counter[str]
    num_events: int
    num_delivered: int
    num_resumed: int


def explore(seeds: range, stop_after: int = 5) -> Summary:
    """All these schedules, or until `stop_after` have failed."""
    failing: list[Outcome] = []
    ends: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    num_schedules = num_events = num_delivered = num_resumed = 0
    for seed in seeds:
        outcome = run(seed)
        num_schedules += 1
        num_events += outcome.num_events
        num_delivered += outcome.num_delivered
        num_resumed += outcome.num_resumed
        ends.update(outcome.ends)
        faults.update(outcome.faults)
        if outcome.problems:
            failing.append(outcome)
            if len(failing) >= stop_after:
                break
    return Summary(
        num_schedules=num_schedules, failing=failing, ends=ends, faults=faults, num_events=num_events,
        num_delivered=num_delivered, num_resumed=num_resumed,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Explore transfers under faults; exit 1 if an invariant fails.")
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds")
    parser.add_argument("--trace", action="store_true", help="print every message of the first one")
    options = parser.parse_args()
    if options.trace:
        outcome = run(options.seed, print)
        print(outcome)
        return 1 if outcome.problems else 0
    found = explore(range(options.seed, options.seed + options.count))
    print(
        f"{found.num_schedules} schedules, {found.num_events} events, {found.num_delivered} transfers delivered, "
        f"{found.num_resumed} resumed"
    )
    print(f"requests: {dict(found.ends)}\nfaults: {dict(found.faults)}")
    for outcome in found.failing:
        print(f"seed {outcome.seed}: {'; '.join(outcome.problems)}")
    return 1 if found.failing else 0


if __name__ == "__main__":
    sys.exit(main())
