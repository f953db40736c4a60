"""Pages of HTML that open offline, for the extras that report."""
