"""Evaluation of models on generated tasks, by the engine or with other attention, and tables of the scores."""
