"""Numbers for tests and gates."""
