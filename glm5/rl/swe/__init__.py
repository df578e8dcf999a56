"""Tasks of software engineering: faults put into packages, commits of repositories, and rows of published sets."""
