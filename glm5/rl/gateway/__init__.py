"""Conversations of agents as trees of tokens, whatever client sends them (docs/rl-gateway.md)."""
