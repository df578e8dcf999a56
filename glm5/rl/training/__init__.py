"""Training on rollouts."""
