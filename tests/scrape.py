"""What Prometheus would scrape from the metrics ports of the connected Ray cluster, and what the dashboard's API says.

scraper = Scraper()
run_campaign(loaded, also=scraper.tick)
scraper.seen["ray_patchline_loss"]  →  {"run": "digits", "stage": "pretrain", …}
"""

import re
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import ray

from jobs.cluster.embedded import token_path

EVERY_S = 2.0
SAMPLE = re.compile(r"^(ray_\w+)\{(.*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Scraper:
    """Scrapes every node again and again, as the `also` of a campaign."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, str]] = {}  # metric → labels of a sample
        self.next_look = 0.0

    def tick(self, attempt_folder: Path, number: int) -> None:
        """Look every two seconds; the cluster may be coming or going."""
        if time.monotonic() < self.next_look:
            return
        self.next_look = time.monotonic() + EVERY_S
        with suppress(OSError, ValueError, KeyError):
            for node in ray.nodes():
                text = fetch(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics")
                for name, labels, _ in SAMPLE.findall(text):
                    self.seen[name] = dict(LABEL.findall(labels))


def fetch(url: str) -> str:
    """Return what a port answers to whoever has the cluster's token."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token_path().read_text().strip()}"})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()
