"""Imports what a fork server imports for its workers; the forkserver of the fault tests is told this name."""

from jobs.cluster.fork_server import import_for_workers

import_for_workers()
