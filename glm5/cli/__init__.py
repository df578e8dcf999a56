"""The command line. One file per command; heavy imports happen inside its `run`, after parsing."""
