"""Scrape the metrics ports of the connected Ray cluster as Prometheus does, and read the dashboard's API.

scraper = Scraper()
run_campaign(loaded, watchers=[scraper, "jobs.extras.monitor.gauges:Gauges"])
scraper.seen["ray_patchline_loss"]  →  {"run": "digits", "stage": "pretrain", …}
"""

import re
import time
import urllib.request
from collections.abc import Iterable
from contextlib import suppress

import ray

from jobs.cluster.embedded import token_path
from jobs.run.reading import StatusMessage
from jobs.run.watchers import Watcher

EVERY_S = 0.5
HOLD_S = 40.0
EXPORT_EVERY = ("RAY_metrics_report_interval_ms", "1000")  # variable of Ray's processes, and its minimum
SAMPLE = re.compile(r"^(ray_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Scraper(Watcher):
    """Scrapes every node repeatedly, as a watcher of a campaign.

    Ray exports a metric with a delay of up to EXPORT_EVERY (10 s without that variable), which is longer than a small
    stage trains. The scraper therefore holds the driver in the attempt `held_attempt` until it has seen all metrics in
    `wanted`, for at most HOLD_S; the workers continue.
    """

    def __init__(self, wanted: Iterable[str] = (), held_attempt: int = 0) -> None:
        self.seen: dict[str, dict[str, str]] = {}  # metric → labels of a sample
        self.wanted = set(wanted)
        self.held_attempt = held_attempt
        self.next_look = 0.0

    def status(self, message: StatusMessage) -> None:
        """Scrape periodically; the cluster may be starting or stopping."""
        deadline = time.monotonic() + HOLD_S
        while message.attempt == self.held_attempt and self.wanted - self.seen.keys() and time.monotonic() < deadline:
            self.scrape()
            time.sleep(EVERY_S)
        if time.monotonic() >= self.next_look:
            self.next_look = time.monotonic() + EVERY_S
            self.scrape()

    def scrape(self) -> None:
        """Read the metrics of every responding node."""
        with suppress(OSError, ValueError, KeyError):
            for node in ray.nodes():
                text = fetch(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics")
                for name, labels, _ in SAMPLE.findall(text):
                    self.seen[name] = dict(LABEL.findall(labels))


def fetch(url: str) -> str:
    """Return a port's response to a request with the cluster's token."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token_path().read_text().strip()}"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()
