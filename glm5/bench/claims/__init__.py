"""`glm5 report`: claims of the GLM-5 report, re-tested small (docs/report.md). The registry is claims.toml."""
