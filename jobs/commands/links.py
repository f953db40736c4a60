"""The links between workers, judged: what a step's sums over the workers cost, and which two have the slowest link."""

from collections.abc import Sequence

from data.files import size_text
from jobs.commands.needs import Finding, Needs, StageNeed
from pipeline.monitoring.telemetry import counted, milliseconds
from pipeline.preflight.network import Network, PairTime
from pipeline.preflight.worker import WorkerReport

SLOW_PAIR = 3.0  # times the time of the fastest pair of its kind; on two busy cores equal pairs differ by less
SLOW_REDUCTION = 0.5  # of the time that a step computes; DeepSpeed does not hide it behind the backward pass by default


def judge_links(network: Network | None, workers: Sequence[WorkerReport], needs: Needs) -> list[Finding]:
    """Say how fast the workers sum, what that costs a step, and which two have the slowest link."""
    if network is None:
        return [Finding("OK", "links", "one worker: nothing is sent")]
    nodes = [worker["identity"]["node"] for worker in workers]
    interfaces = sorted({worker["interface"] or "the default" for worker in workers})
    rate = network["bytes"] / network["seconds"]
    text = (
        f"{size_text(network['bytes'])} in {milliseconds(network['seconds'])} ({size_text(round(rate))}/s), one number "
        f"in {milliseconds(network['latency_s'])}, over {', '.join(interfaces)}"
    )
    findings = [Finding("OK", "all-reduce", text)]
    for stage in needs.stages:
        findings.append(judge_reduction(network, stage))
    findings.append(judge_pairs(network, nodes))
    return findings


def judge_reduction(network: Network, stage: StageNeed) -> Finding:
    """Say what the sums over the workers will cost a step of a stage, and compare it with what `plan` assumes."""
    rate = network["bytes"] / network["seconds"]
    seconds = stage.reductions * (network["latency_s"] + stage.gradient_bytes / rate)
    text = (
        f"{stage.name}: {stage.reductions:g} × {size_text(stage.gradient_bytes)} of gradients, about "
        f"{milliseconds(seconds)} a step"
    )
    if stage.compute_s is None:
        return Finding("OK", "reduction", f"{text} (plan assumes no speed of CPUs to compare it with)")
    share = seconds / stage.compute_s
    text += f", {share:.0%} of the {milliseconds(stage.compute_s)} that plan assumes for computing it"
    if share > SLOW_REDUCTION:
        remedy = "use the fast network for NCCL (docs/design/cluster.md); a larger batch_size or zero=1 sums less often"
        return Finding("WARN", "reduction", text, remedy)
    return Finding("OK", "reduction", text)


def judge_pairs(network: Network, nodes: Sequence[str]) -> Finding:
    """Name the slowest pair of workers, and warn where its link is far slower than others of its kind."""
    pairs = network["pairs"]
    which = f"all {counted(len(pairs), 'pair')} of workers"
    if not network["all_pairs"]:
        which = f"{len(pairs)} pairs (neighbours in the ring; first workers of nodes)"
    slowest = max(pairs, key=lambda pair: pair["seconds"])
    text = (
        f"{which}; slowest {pair_text(slowest, nodes)}: {size_text(network['message_bytes'])} in "
        f"{milliseconds(slowest['seconds'])}, one number in {milliseconds(slowest['latency_s'])}"
    )
    # Between nodes a message takes another way than within one: only those of one kind are compared.
    slow: list[PairTime] = []
    worst = 1.0
    for is_within in (True, False):
        kind = [pair for pair in pairs if (len(nodes_of(pair, nodes)) == 1) == is_within]
        for pair in kind:
            ratio = pair["seconds"] / min(other["seconds"] for other in kind)
            if ratio > SLOW_PAIR:
                slow.append(pair)
                worst = max(worst, ratio)
    if not slow:
        return Finding("OK", "links", text)
    common = set.intersection(*[nodes_of(pair, nodes) for pair in slow])
    where = "these nodes'"
    if len(common) == 1:
        where = f"{min(common)}'s"
    remedy = f"look at {where} cable, switch port and routes; NCCL_SOCKET_IFNAME names another interface"
    count = "it is" if len(slow) == 1 else f"{len(slow)} pairs are"
    return Finding("WARN", "links", f"{text}; {count} up to {worst:.0f} × as slow as the fastest of their kind", remedy)


def nodes_of(pair: PairTime, nodes: Sequence[str]) -> set[str]:
    return {nodes[rank] for rank in pair["ranks"]}


def pair_text(pair: PairTime, nodes: Sequence[str]) -> str:
    low, high = pair["ranks"]
    return f"{low}–{high} ({nodes[low]}, {nodes[high]})"
