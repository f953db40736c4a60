"""Self-contained HTML pages for the extras that write reports."""
