"""How a run stands as metadata of its Ray job, which the dashboard and `ray job list` show: text by name."""

import time

from jobs.monitor import job_metadata
from jobs.monitor.status_poller import View
from pipeline.monitoring.telemetry import amount, duration

# What is read from the newest records; "" where there are none yet.
OF_RECORDS = ("step", "loss", "images_per_s", "workers", "eta", "reported", "last_checkpoint")


def show(view: View) -> None:
    """Bring the job's metadata up to date; nothing happens where this process is no submitted job."""
    job_metadata.update(metadata_of(view))
    if view.state == "ended":
        # The next thing may be the end of this process.
        job_metadata.flush()


def metadata_of(view: View) -> dict[str, str]:
    """Return what the job's page tells of the stage; times are those of the driver's clock."""
    texts = {
        "stage": view.stage,
        "key": view.key,
        "activity": f"{view.stage} is {view.state}",
        # All of them always: what a stage does not tell must not be left from the one before.
        **dict.fromkeys(OF_RECORDS, ""),
        "restarts": str(max(0, view.attempts - 1)),
        "incidents": str(view.incidents),
    }
    if view.report is not None:
        texts["step"] = f"{view.report['step']}/{view.report['steps']}"
        texts["loss"] = f"{view.report['loss']:.4f}"
        texts["images_per_s"] = amount(view.report["images_per_s"])
        texts["workers"] = str(view.report["world"])
        texts["eta"] = duration(view.report["eta_s"])
        texts["reported"] = clock(view.report["time"])
    # Times and no ages: a page that was loaded an hour ago still tells the truth.
    if view.commit is not None:
        texts["last_checkpoint"] = f"step {view.commit['step']} at {clock(view.commit['time'])}"
    return texts


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
