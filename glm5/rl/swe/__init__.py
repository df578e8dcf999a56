"""Tasks of software engineering: faults that are put into packages with tests, and rows of published sets."""
