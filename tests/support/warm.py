"""Import the modules that a fork server imports for its workers; the fault tests' forkserver preloads this module."""

from jobs.cluster.fork_server import import_for_workers

import_for_workers()
