"""The reports that workers and nodes make for `jobs preflight`: folder, machine, sets and links."""
