"""What `pdxfer doctor --live` judges: a running cluster as its controller sees it. Pure; imports nothing heavy.

Always: what engines and workers report of themselves (allocators, tiers, channels). When nothing runs: what is then
still out has leaked: blocks, credits, leases.
"""

from dataclasses import dataclass

from pdxfer.client.model import EngineHealth, RankHealth, Summary
from pdxfer.router.snapshot import EngineView

_NULL_BLOCKS = 1
"""vLLM keeps one block for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong; equal in every look as long as it lasts."""

    where: str
    """Engine, engine/rank, or cluster."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One look, or what several looks have in common."""

    clean: bool
    at_rest: bool
    """No request was under way: leaks could be told from use."""
    num_engines: int
    problems: list[Problem]


def look(health: list[EngineHealth], summary: Summary, nodes: list[EngineView]) -> Report:
    """Judge what the controller said at one moment."""
    at_rest = not (summary.num_leases or summary.num_queued) and all(
        node.num_running + node.num_waiting == 0 for node in nodes
    )
    problems = [problem for engine in health for problem in _engine(engine)]
    if not nodes:
        problems.append(Problem(where="cluster", text="no engine has joined"))
    if at_rest:
        problems += _flows(summary)
        problems += [problem for node in nodes for problem in _leaks(node)]
    return Report(clean=not problems, at_rest=at_rest, num_engines=len(nodes), problems=problems)


def in_both(before: Report, after: Report) -> Report:
    """What two looks agree on: what was only between two reports is no problem."""
    lasting = [problem for problem in after.problems if problem in before.problems]
    return Report(clean=not lasting, at_rest=after.at_rest, num_engines=after.num_engines, problems=lasting)


def _engine(engine: EngineHealth) -> list[Problem]:
    found = [Problem(where=engine.engine_id, text=_steady(text)) for text in engine.problems]
    if engine.state not in ("ready", "draining"):
        found.append(Problem(where=engine.engine_id, text=f"it is {engine.state}"))
    return found + [problem for rank in engine.ranks for problem in _rank(engine.engine_id, rank)]


def _rank(engine_id: str, rank: RankHealth) -> list[Problem]:
    texts = [_steady(text) for text in rank.problems]
    texts += [f"tier {tier} is away" for tier in rank.unreachable_tiers]
    texts += [f"there is no channel to {peer}: {reason}" for peer, reason in rank.closed_channels.items()]
    return [Problem(where=f"{engine_id}/w{rank.rank}", text=text) for text in texts]


def _steady(text: str) -> str:
    """The lag's figure differs in each look."""
    return "its heartbeats leave late: the process is held up" if text.startswith("its heartbeat left") else text


def _flows(summary: Summary) -> list[Problem]:
    return [
        Problem(
            where="cluster",
            text=f"{flow.num_live} transfers from {flow.prefill} to {flow.decode} never ended, though no lease is left",
        )
        for flow in summary.flows
        if flow.num_live
    ]


def _leaks(node: EngineView) -> list[Problem]:
    texts = []
    missing = node.num_blocks - node.credit_blocks - node.reserved_blocks
    if node.credit_limit is None and missing > _NULL_BLOCKS:
        texts.append(f"{missing} of {node.num_blocks} KV blocks are not free, though it runs nothing")
    if node.reserved_blocks:
        texts.append(f"{node.reserved_blocks} blocks are still promised, though no request waits for them")
    if node.outstanding_tokens:
        texts.append(f"{node.outstanding_tokens} prompt tokens count as its load, though no transfer is left")
    if node.num_transfers:
        texts.append(f"{node.num_transfers} transfers have not ended")
    found = [Problem(where=node.engine_id, text=text) for text in texts]
    for rank in node.ranks:
        for tier in rank.tiers:
            if tier.leases:
                text = f"{tier.leases} leases on values of tier {tier.kind} were not returned"
                found.append(Problem(where=f"{node.engine_id}/w{rank.rank}", text=text))
    return found
