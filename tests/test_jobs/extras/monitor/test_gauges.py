"""The gauges of a run, and the Prometheus and Grafana files that use them."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from jobs.cluster.ray_agent import WORKER_GAUGE
from jobs.extras.monitor.gauges import OF_DRIVER, OF_REPORT, OF_RUN, values_of
from jobs.run.reading import StageReader
from tests.test_jobs.run.test_reading import REPORT, two_attempts

pytestmark = pytest.mark.quick

DEPLOY = Path(__file__).parents[4] / "deploy" / "monitoring"


def test_unknown_and_non_finite_values_have_no_gauge_and_is_finite_reports_them(tmp_path) -> None:
    message = StageReader(two_attempts(tmp_path)).read("waiting")
    values = values_of(replace(message, time=1060.0))
    assert values["loss"] == 2.8410
    assert values["checkpoint_age_s"] == 120.0
    assert values["report_age_s"] == 60.0
    assert (values["waiting"], values["restarts"], values["incidents"], values["is_finite"]) == (1.0, 1.0, 1.0, 1.0)
    assert "mfu" not in values
    assert "lr" not in values
    values = values_of(replace(message, report={**REPORT, "loss": math.nan}))
    assert values["is_finite"] == 0.0
    assert "loss" not in values
    assert set(values) <= {*OF_REPORT, *OF_DRIVER}


# ------------------------------------------------------------------------ the files for Prometheus and Grafana


def expressions() -> list[str]:
    """Return every query of the dashboard and of the alerts."""
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    queries = [
        variable["query"]["query"] for variable in dashboard["templating"]["list"] if variable["name"] != "datasource"
    ]
    for panel in dashboard["panels"]:
        queries += [target["expr"] for target in panel.get("targets", [])]
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]:
        queries += [rule["expr"] for rule in group["rules"]]
    return queries


def test_the_dashboard_and_the_alerts_use_only_exported_metrics() -> None:
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    exported = {f"ray_patchline_{name}" for name in (*OF_REPORT, *OF_DRIVER, *OF_RUN)} | {f"ray_{WORKER_GAUGE}"}
    exported |= {f"ray_{name}" for name in METRICS_GAUGES}
    shown: set[str] = set()
    for query in expressions():
        names = re.findall(r"\bray_\w+", query)
        assert names or 'up{job="ray"}' in query, query
        shown.update(names)
    assert shown <= exported
    # The values that the operators' requirements name.
    for name in ("loss", "images_per_s", "mfu", "wait_storage", "checkpoint_age_s", "restarts", "incidents", "world"):
        assert f"ray_patchline_{name}" in shown


def test_prometheus_loads_the_file_with_the_alerts() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    (job,) = config["scrape_configs"]
    assert job["file_sd_configs"] == [{"files": ["/tmp/ray/prom_metrics_service_discovery.json"]}]
    assert job["job_name"] == "ray", "the alerts name it"


# Two nodes, scraped every minute. First value: run h14 ends with exit code 0. Second: its node is lost after five
# minutes. Ray lists only living nodes: for a lost node, `up` vanishes with all its metrics instead of becoming 0.
LIVES_ON = "1+0x120"
RUNS_ON = "3+0x120"
HEAD = 'instance="10.0.0.1:40001", job="ray"'
NODE = 'instance="10.0.0.2:40002", job="ray"'
OF_H14 = f'run="h14", {NODE}'
SERIES = {
    f"up{{{HEAD}}}": (LIVES_ON, LIVES_ON),
    f"up{{{NODE}}}": (LIVES_ON, "1+0x5 stale"),
    f'ray_node_cpu_count{{ip="10.0.0.1", IsHeadNode="true", {HEAD}}}': (LIVES_ON, LIVES_ON),
    f'ray_node_cpu_count{{ip="10.0.0.2", IsHeadNode="false", {NODE}}}': (LIVES_ON, "1+0x5 stale"),
    f"ray_patchline_lease_age_s{{{OF_H14}}}": ("3+0x5 stale", "3+0x5 stale"),
    f"ray_patchline_exit_code{{{OF_H14}}}": ("_x5 0 stale", "_x120"),
    f'ray_patchline_lease_age_s{{run="l16", {HEAD}}}': (RUNS_ON, "3+0x5 25+0x120"),
    f'ray_patchline_report_age_s{{stage="pretrain", {OF_H14}}}': ("5+0x5 stale", "5+0x5 stale"),
    f'ray_patchline_waiting{{stage="pretrain", {OF_H14}}}': ("0+0x5 stale", "0+0x5 stale"),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian's prometheus)")
@pytest.mark.parametrize(
    ("column", "only", "minute", "expected"),
    [
        # No alert for the successful end of h14, neither soon nor later.
        (0, None, 10, set()),
        (0, None, 90, set()),
        # A node is lost with the driver of h14; the driver of another run cannot renew its lease.
        (1, None, 10, {"PatchlineNodeGone", "PatchlineRunGone", "PatchlineLease"}),
        # Alerts for dead runs stay; the alert for the lost node ends after an hour.
        (1, None, 90, {"PatchlineRunGone", "PatchlineLease"}),
        # The whole cluster is gone, or Prometheus has never seen one.
        (1, "waiting", 45, {"PatchlineClusterGone", "PatchlineNoRun"}),
    ],
)
def test_alerts_fire_for_a_dead_node_or_driver_but_not_for_a_run_that_ended_well(
    column, only, minute, expected, tmp_path
) -> None:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    names = [rule["alert"] for rule in group["rules"]]
    series = []
    for name, values in SERIES.items():
        if only is None or only in name:
            series.append({"series": name, "values": values[column]})
    checks = []
    for name in names:
        # Two nodes or runs can fire the same alert.
        expression = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) > bool 0'
        samples = [{"labels": "{}", "value": 1}] if name in expected else []
        checks.append({"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples})
    test = {"interval": "1m", "input_series": series, "promql_expr_test": checks}
    file = tmp_path / "alerts_test.yml"
    document = {"rule_files": [str(DEPLOY / "alerts.yml")], "evaluation_interval": "1m", "tests": [test]}
    file.write_text(yaml.safe_dump(document))
    for words in (["check", "rules", str(DEPLOY / "alerts.yml")], ["test", "rules", str(file)]):
        result = subprocess.run(["promtool", *words], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
