"""Optional data tools; training does not depend on any of them."""
